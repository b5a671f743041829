import sys

from speccascade_jax.commands import main

sys.exit(main(["report", *sys.argv[1:]]))
