"""``python -m tests.fuzz twins``, ``forms`` or ``files``; each has ``--help``."""

import sys

from tests.fuzz import files, rows

if sys.argv[1:2] == ["files"]:
    sys.exit(files.main(sys.argv[2:]))
sys.exit(rows.main())
