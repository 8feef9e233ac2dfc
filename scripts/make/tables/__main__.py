"""python -m scripts.make.tables."""

from scripts.make.tables import main

raise SystemExit(main())
