"""The flags of inference servers: reads them as argparse does, and names what they quantize."""

from collections.abc import Sequence


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """The last value of each flag, by its name without dashes in front, with "-" for "_"; "" for a flag without one.

    "--tp_size=2" and "--tp-size 2" both give {"tp-size": "2"}. A part of a JSON value, such as "--hf-overrides.x 1",
    counts for the whole flag. "-qfp8" is "-q fp8".
    """
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not word[1:].replace(".", "", 1).isdigit():
            if word[:2] == "-q" != word:
                word = f"-q={word[2:].removeprefix('=')}"
            given, equals, value = word.partition("=")
            name = given.lstrip("-").replace("_", "-").partition(".")[0]
            found[name] = value
            if equals:
                name = ""
        elif name:
            found[name], name = word, ""
    return found


def quantization_of(weights: str, kv_dtype: str) -> str:
    """The name under which quantized weights, a quantized KV cache or both have limits of their own in an audit, such
    as "fp8+kv_fp8_e5m2"; empty: neither is quantized.

    weights: empty or "none" if they are not quantized. kv_dtype: the KV cache's, of any name.
    """
    kv_dtype = kv_dtype.lower().removeprefix("torch.")
    kept = kv_dtype in ("", "auto", "bfloat16", "bf16", "float16", "half", "float32")
    weights = "" if weights.lower() == "none" else weights.lower()
    return "+".join(filter(None, (weights, "" if kept else f"kv_{kv_dtype}")))
