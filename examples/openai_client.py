"""The official OpenAI client against `sglang serve`. Usage: openai_client.py [URL] [FOLDER]"""

import base64
import sys
import urllib.request
from pathlib import Path

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
folder = Path(sys.argv[2] if len(sys.argv) > 2 else "out")
folder.mkdir(parents=True, exist_ok=True)
client = OpenAI(base_url=f"{url}/v1", api_key="not needed without --api-key")

# Two pictures, downloaded from the server; sampling fields go into extra_body.
answer = client.images.generate(prompt="a red apple", n=2, extra_body={"seed": 42})
for i, picture in enumerate(answer.data):
    path = folder / f"apple_{i}.png"
    path.write_bytes(urllib.request.urlopen(picture.url).read())
    print(path, "seed", picture.seed, "sha256", picture.report["sha256"])

# One picture with two previews of it while it is made.
events = client.images.generate(prompt="a green tree", stream=True, partial_images=2)
for event in events:
    path = folder / ("tree.png" if event.type.endswith("completed") else "tree_preview.png")
    path.write_bytes(base64.b64decode(event.b64_json))
    print(path, event.type)

# The first picture, changed, where the model can: FLUX.1 starts from it as far as `strength` says.
answer = client.images.edit(
    image=(folder / "apple_0.png").open("rb"),
    prompt="a yellow apple",
    response_format="b64_json",
    extra_body={"strength": 0.8},
)
path = folder / "yellow.png"
path.write_bytes(base64.b64decode(answer.data[0].b64_json))
print(path, "edited")
