"""From turns to rows: links, plan, fill."""
