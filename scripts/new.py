import sys

from speccascade_jax.commands import main

sys.exit(main(["new", *sys.argv[1:]]))
