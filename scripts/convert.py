import sys

from speccascade_jax.commands import main

sys.exit(main(["convert", *sys.argv[1:]]))
