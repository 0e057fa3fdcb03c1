// Renders SVG jobs with resvg: node render.mjs JOBS.json OUT.bin OUT.offsets.json
// JOBS is a list of SVG documents; OUT.bin holds their PNG files (256x256 RGBA) one after another.
import { createRequire } from "node:module";
import { readFileSync, writeFileSync, openSync, writeSync, closeSync } from "node:fs";
import path from "node:path";

const [jobsPath, binPath, offsetsPath] = process.argv.slice(2);
const require = createRequire(path.resolve(path.dirname(jobsPath), "npm", "package.json"));
const { Resvg } = require("@resvg/resvg-js");

const jobs = JSON.parse(readFileSync(jobsPath, "utf8"));
const out = openSync(binPath, "w");
const offsets = [0];
for (const svg of jobs) {
  const png = new Resvg(svg, { fitTo: { mode: "width", value: 256 } }).render().asPng();
  writeSync(out, png);
  offsets.push(offsets[offsets.length - 1] + png.length);
}
closeSync(out);
writeFileSync(offsetsPath, JSON.stringify(offsets));
