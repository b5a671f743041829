import sys

from speccascade_jax.commands import main

sys.exit(main(["plan", *sys.argv[1:]]))
