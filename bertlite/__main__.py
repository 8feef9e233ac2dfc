from bertlite.cli import main

raise SystemExit(main())
