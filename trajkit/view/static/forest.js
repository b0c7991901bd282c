"use strict"; TK.forest = () => "";
