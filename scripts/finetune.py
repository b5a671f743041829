"""Fine-tunes (or trains from scratch) the model of a config: python scripts/finetune.py --config=NAME"""

import argparse

from speccascade_jax import config as configs
from speccascade_jax import training

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    training.train(configs.load(parser.parse_args().config))
