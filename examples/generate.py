"""Continue a few prompts with several checkpoints, side by side.

python examples/generate.py examples/tiny-gpt2 demo-output/tiny-llama
"""

from __future__ import annotations

from pathlib import Path

import click
from transformers import AutoModelForCausalLM

from converter.files.tokenizer import load_tokenizer
from converter.measure.models import quiet_transformers

PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    'class Queue:\n    """',
    "    try:\n        return self.",
)


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=24, show_default=True, help="Tokens to add to each prompt.")
def main(checkpoints: tuple[Path, ...], tokens: int) -> None:
    """Print greedy continuations of some lines of Python."""
    quiet_transformers()
    models = {path: AutoModelForCausalLM.from_pretrained(path).float() for path in checkpoints}
    for prompt in PROMPTS:
        print(f"\n{'=' * 8} {prompt!r}")
        for path, model in models.items():
            tokenizer = load_tokenizer(path)
            assert tokenizer is not None
            start = model.config.bos_token_id
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
            if start is not None:
                ids = ids.new_tensor([[start, *ids[0].tolist()]])
            output = model.generate(
                input_ids=ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=tokens, do_sample=False
            )
            print(f"-------- {path}\n{tokenizer.decode(output[0, 1 if start is not None else 0 :])}")


if __name__ == "__main__":
    main()
