"""A picture becomes another: python examples/image_to_image.py in.png "a red apple" out

Without arguments it draws a green apple first, and turns that into a red one.
"""

import sys

from sglang.multimodal_gen import DiffGenerator


def main(picture: str | None, prompt: str, folder: str) -> None:
    with DiffGenerator.from_pretrained() as generator:
        start = picture or generator.generate(prompt="a green apple", seed=1).image
        for strength in (0.3, 0.6, 0.9):  # from close to the picture to far from it
            result = generator.generate(
                prompt=prompt, image=start, strength=strength, save_output=True, output_path=folder
            )
            print(strength, len(result.report["step_seconds"]), result.output_file_path)


if __name__ == "__main__":
    main(*(sys.argv[1:4] if len(sys.argv) > 3 else (None, "a red apple", "out")))
