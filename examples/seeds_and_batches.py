"""Picture i of a request has seed + i and equals the single picture of that seed, byte for byte."""

from sglang.multimodal_gen import DiffGenerator


def main() -> None:
    with DiffGenerator.from_pretrained() as generator:
        three = generator.generate(prompt="a fox", seed=7, num_outputs_per_prompt=3)
        alone = generator.generate(prompt="a fox", seed=8)
    print([result.seed for result in three])
    print("equal" if three[1].report["sha256"] == alone.report["sha256"] else "different")


if __name__ == "__main__":
    main()
