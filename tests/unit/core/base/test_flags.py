"""Flags as argparse reads them, and the names of quantizations."""

import pytest

from echo2d.core.base.flags import flag_values, quantization_of


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {}),
        ("--tp 2 --cpu", {"tp": "2", "cpu": ""}),
        ("--tp_size=2 -q fp8", {"tp-size": "2", "q": "fp8"}),
        ("--tp 2 --tp 4", {"tp": "4"}),
        ("--low -5 --targets a b", {"low": "-5", "targets": "a"}),
        ("--empty= stray", {"empty": ""}),
        ("-qfp8 --low -0.5", {"q": "fp8", "low": "-0.5"}),
        ("-q=fp8 -qfp8_e4m3=", {"q": "fp8_e4m3="}),
        ("--quantization_config.linear.weight x", {"quantization-config": "x"}),
        ("--mem=0.5 --hf-overrides.a.b+=1", {"mem": "0.5", "hf-overrides": "1"}),
    ],
)
def test_the_last_value_of_a_flag_counts(line: str, values: dict[str, str]) -> None:
    assert flag_values(line.split()) == values


@pytest.mark.parametrize(
    ("weights", "kv_dtype", "name"),
    [
        ("", "auto", ""),
        ("", "torch.bfloat16", ""),
        ("FP8", "", "fp8"),
        ("None", "auto", ""),
        ("", "fp8_e4m3", "kv_fp8_e4m3"),
        ("fp8", "FP8_E5M2", "fp8+kv_fp8_e5m2"),
    ],
)
def test_a_quantization_has_one_name(weights: str, kv_dtype: str, name: str) -> None:
    assert quantization_of(weights, kv_dtype) == name
