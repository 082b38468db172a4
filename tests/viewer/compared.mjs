// What the page says of two sides, as JSON: the heads as it ranks them, and what it draws between their shared units.
//   node compared.mjs PAGE.html ... < {"words": true}
import { readFileSync } from "node:fs";

const source = (name) => import(new URL(`../../attnscope/viewer/src/${name}.js`, import.meta.url));
const { Blobs, Page } = await source("data");
const { DEFAULTS } = await source("store");
const { compared, ranked } = await source("views/difference");

const state = { ...DEFAULTS, ...JSON.parse(readFileSync(0, "utf8")) };
const rowsOf = ({ values, rows, columns }) =>
  Array.from({ length: rows }, (_, row) => Array.from(values.subarray(row * columns, (row + 1) * columns))); // NaN is null

async function said(path) {
  const html = readFileSync(path, "latin1");
  const within = (id) => new RegExp(`id="${id}">(.*?)</script>`, "s").exec(html)[1];
  const page = new Page(JSON.parse(within("page")), new Blobs((blob) => within(`blob-${blob}`)));
  const heads = [];
  for await (const one of ranked(page, state)) {
    const { masses, difference } = await compared(page, one.at, one.head, state);
    const labels = [difference.rowUnits.label, difference.columnUnits.label];
    heads.push({ ...one, labels, masses: masses.map(rowsOf), difference: rowsOf(difference) });
  }
  return heads;
}
console.log(JSON.stringify(await Promise.all(process.argv.slice(2).map(said))));
