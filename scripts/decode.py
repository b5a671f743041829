import sys

from speccascade_jax.commands import main

sys.exit(main(["decode", *sys.argv[1:]]))
