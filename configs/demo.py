"""The bundled English-to-German pair (speccascade_jax/demo), ready to run."""

from speccascade_jax.config import DEMO, DecodeConfig

config = DecodeConfig(
    drafter=str(DEMO / "drafter"),
    verifier=str(DEMO / "verifier"),
    method="token_v3",
    alpha=0.2,
    block_size=5,
    max_source_length=80,
    max_new_tokens=80,
    router=str(DEMO / "router.json"),
    task="demo_verifier",
    examples=(
        "Where is the station? I have to catch the last train to Berlin.",
        "Tom said that he would come tomorrow, but I don't believe him.",
        "I'd like to learn German. Can you help me? My brother speaks it very well.",
        "She opened the window because it was too hot in the room.",
    ),
)
