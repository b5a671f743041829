"""beartype that takes an int where a float is asked for; jaxtyping checks shapes through it."""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
