"use strict"; TK.tokens = () => "";
