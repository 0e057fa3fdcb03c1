"""The report of a picture: its tier, its fused sites, its times."""

from sglang.multimodal_gen import DiffGenerator


def main() -> None:
    with DiffGenerator.from_pretrained() as generator:
        report = generator.generate(prompt="a blue car", quality="high").report
    print("asked for", report["requested_quality"], "and got", report["quality"])
    for site in report["sites"]:
        print(f"{site['op']:30} {site['status']:10} {site['reason'] or ''}")
    for stage, seconds in report["stage_seconds"].items():
        print(f"{stage:30} {seconds:.3f} s")


if __name__ == "__main__":
    main()
