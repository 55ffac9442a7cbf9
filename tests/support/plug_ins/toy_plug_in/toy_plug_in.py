"""A package of another project: one architecture and one format of weights."""

import msgspec

import troupellm


def describe(reader: troupellm.ConfigReader) -> troupellm.DecoderConfig:
    """Llama with a factor on its logits, `logit_factor` in config.json."""
    plain = troupellm.decoder_config(reader)
    return msgspec.structs.replace(plain, logit_scale=reader.number("logit_factor", 1.0))


class RowBytes:
    """Weights in eight bits: `codes` int8 [outputs, inputs], `scales` float32 [outputs]; w = code * scale."""

    method = "row-bytes"

    def __init__(self, reader: troupellm.ConfigReader) -> None:
        """reader: the checkpoint's `quantization_config`."""
        reader.choice("version", ("1",))

    def linear(
        self, stored: troupellm.QuantizedCheckpoint, name: str, shape: tuple[int, int]
    ) -> "troupellm.QuantizedWeight | object":
        if not stored.has(f"{name}.codes"):
            return stored.plain(name, shape)
        codes, scales = stored.raw(f"{name}.codes", shape, "I8"), stored.raw(f"{name}.scales", shape[:1], "F32")
        return stored.build(name, lambda: troupellm.Int8WeightOnly(codes, scales[:, None], dtype=stored.dtype))

    def outline(self, stored: troupellm.QuantizedCheckpoint, name: str) -> troupellm.Outline | None:
        if not stored.has(f"{name}.codes"):
            return None
        rows, columns = stored.sides(f"{name}.codes")
        return troupellm.Outline("int8", rows, columns, columns)

    def notes(self) -> tuple[str, ...]:
        return ()
