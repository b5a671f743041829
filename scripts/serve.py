import sys

from speccascade_jax.commands import main

sys.exit(main(["serve", *sys.argv[1:]]))
