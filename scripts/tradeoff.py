import sys

from speccascade_jax.commands import main

sys.exit(main(["tradeoff", *sys.argv[1:]]))
