"""``python -m djl_python_neuronx``: the command line."""

import sys

from djl_python_neuronx.cli import main

sys.exit(main())
