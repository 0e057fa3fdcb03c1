"""A prompt becomes a picture: python examples/text_to_image.py "a red apple" out"""

import sys

from sglang.multimodal_gen import DiffGenerator


def main(prompt: str, folder: str) -> None:
    with DiffGenerator.from_pretrained() as generator:
        result = generator.generate(prompt=prompt, seed=42, save_output=True, output_path=folder)
    print(result.output_file_path, result.report["sha256"])


if __name__ == "__main__":
    main(*(sys.argv[1:3] if len(sys.argv) > 2 else ("a red apple", "out")))
