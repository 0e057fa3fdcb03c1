// Two pictures of one size, compared. All functions take RGBA bytes and leave alpha out.

/** {psnr (dB; Infinity for equal pictures), largest (0..255), differing (share of values)}. */
export function difference(one, other) {
  if (one.length !== other.length) throw new RangeError("pictures of two sizes");
  let squares = 0;
  let largest = 0;
  let differing = 0;
  for (let i = 0; i < one.length; i++) {
    if (i % 4 === 3) continue;
    const delta = Math.abs(one[i] - other[i]);
    squares += delta * delta;
    largest = Math.max(largest, delta);
    differing += delta > 0;
  }
  const count = (one.length / 4) * 3;
  const psnr = 10 * Math.log10((255 * 255 * count) / squares);
  return { psnr, largest, differing: differing / count };
}

/** |one - other| * factor as opaque RGBA; what passes 255 is 255. */
export function amplified(one, other, factor) {
  const out = new Uint8ClampedArray(one.length);
  for (let i = 0; i < one.length; i++) {
    out[i] = i % 4 === 3 ? 255 : Math.abs(one[i] - other[i]) * factor;
  }
  return out;
}

/** The largest of `factors` (rising) at which no difference is cut off, or the smallest of them. */
export function fittingFactor(largest, factors) {
  return factors.findLast((factor) => largest * factor <= 255) ?? factors[0];
}

/** The RGBA bytes of an image file, as stored: no colour conversion. */
export async function pixelsOf(blob) {
  const options = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
  const bitmap = await createImageBitmap(blob, options);
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}
