// One seed in both tiers: what each took, where they differ, and by how much.

import { amplified, difference, fittingFactor, pixelsOf } from "./compare.js";
import { byId, el, seconds } from "./dom.js";
import { engineSeconds, notMounted, Frame } from "./stage.js";

export const TIERS = ["lossless", "high"];
const FACTORS = [1, 2, 4, 8, 16, 32, 64, 128, 255];

/** The two pictures' frames and, between their ends, the difference's. */
export function comparisonFrames(size) {
  const frames = TIERS.map((tier) => new Frame(tier, size));
  const last = new Frame("difference", size);
  frames.forEach((frame) => frame.node.setAttribute("data-tier", frame.title));
  last.node.setAttribute("data-tier", "difference");
  return [...frames, last];
}

/** Fills in the difference; `pictures`: {blob, report} of lossless and high. */
export async function showComparison(frame, pictures) {
  const [one, other] = await Promise.all(pictures.map(({ blob }) => pixelsOf(blob)));
  const found = difference(one.data, other.data);
  byId("psnr").textContent = `PSNR ${found.largest ? found.psnr.toFixed(2) : "∞"} dB`;
  byId("verdict").textContent = verdictOf(found, pictures);
  byId("mounted").textContent = notMounted(pictures[1].report);
  byId("mounted").hidden = !byId("mounted").textContent;
  byId("comparison").hidden = false;

  const canvas = el("canvas", { width: one.width, height: one.height, role: "img" });
  const draw = (factor) => {
    const pixels = amplified(one.data, other.data, factor);
    canvas.getContext("2d").putImageData(new ImageData(pixels, one.width), 0, 0);
    const text = found.largest ? `difference × ${factor}` : "difference: none";
    canvas.setAttribute("aria-label", `${text}; ${byId("psnr").textContent}`);
    frame.caption.textContent = text;
  };
  byId("factor-field").hidden = !found.largest;
  offerFactors(fittingFactor(found.largest, FACTORS), draw);
  frame.box.replaceChildren(canvas);
  frame.stop();
}

function offerFactors(fitting, draw) {
  const select = byId("factor");
  select.replaceChildren(
    ...FACTORS.map((factor) => el("option", { value: factor }, `× ${factor}`)),
  );
  select.value = fitting;
  select.onchange = () => draw(Number(select.value));
  draw(fitting);
}

function verdictOf({ largest, differing }, pictures) {
  const times = TIERS.map((tier, i) => `${tier} ${seconds(engineSeconds(pictures[i].report))}`);
  const share = `${(100 * differing).toFixed(1)} % of the values differ, by ${largest} of 255 at most`;
  const found = largest ? share : "The two pictures are equal in every value";
  return `${found}. Engine time: ${times.join(", ")}.`;
}
