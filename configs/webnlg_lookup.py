"""Facts from DBpedia to a text, without a drafter: drafts are looked up in the facts and in the text so far.
The verifier has to be trained first.
"""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="lookup",
    verifier="runs/webnlg_verifier",
    method="speculative",
    block_size=5,
    max_source_length=160,
    max_new_tokens=96,
    task="webnlg_verifier",
    missing="Train it with python scripts/finetune.py --config=webnlg_verifier.",
    examples=(
        "Northgate Chess Club | ground | Old Town Hall && Northgate Chess Club | members | 120",
        "Mill Lake Bridge | location | Mill Lake, Norway && Mill Lake Bridge | length | 214 (metres)",
    ),
)
