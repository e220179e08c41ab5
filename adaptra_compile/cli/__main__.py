"""``python -m adaptra.cli``: the command ``adaptra`` when its script is not on the path."""

import sys

from adaptra.cli import main

sys.exit(main())
