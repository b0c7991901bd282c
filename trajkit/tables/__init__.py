"""Arrow tables: checked where they enter, in canonical form, and handed back."""
