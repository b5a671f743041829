"""The optimizers: Adafactor as the T5 papers set it, and AdamW with Adafactor's scaling."""

import optax

from speccascade_jax.config import TrainConfig


def scale_by_parameter_rms() -> optax.GradientTransformation:
    """Updates multiplied by their parameter array's root mean square, at least 1e-3.

    Adafactor's parameter scaling without its factored second moment: T5's embeddings start at 1
    and its queries at (D K)^-1/2, and one learning rate has to fit both.
    """
    return optax.scale_by_param_block_rms(min_scale=1e-3)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The config's optimizer. Adafactor is set as in the T5 papers: parameter scaling, no momentum.

    Adapters' updates are not scaled by their arrays' size: half of these begin at 0.
    """
    scaled = not config.lora_rank
    end = 0.0 if config.decay == "linear" else config.learning_rate
    rate = optax.linear_schedule(config.learning_rate, end, max(config.steps - config.warmup_steps, 1))
    if config.warmup_steps:
        warmup = optax.linear_schedule(
            config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps
        )
        rate = optax.join_schedules([warmup, rate], [config.warmup_steps])
    if config.optimizer == "adafactor":
        optimizer = optax.adafactor(rate, multiply_by_parameter_scale=scaled, clipping_threshold=1.0)
    else:
        optimizer = optax.chain(
            optax.scale_by_adam(b1=0.9, b2=0.98),
            scale_by_parameter_rms() if scaled else optax.identity(),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(rate),
        )
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
