import sys

from speccascade_jax.commands import main

sys.exit(main(["memory", *sys.argv[1:]]))
