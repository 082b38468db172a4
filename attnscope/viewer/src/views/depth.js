/**
 * What each layer reads of earlier blocks: their shares of its residual, or the weights of the model's softmax over them.
 * A row per reader, a column per block; next to it the blocks of one reader, the largest first. The numbers are those of
 * `attnscope depth`.
 *
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../types.js").Depth} Depth
 * @typedef {import("../data.js").Side} Side
 */
import { latest, make, spoken } from "../canvas.js";
import { css, diverging, inkOn } from "../colours.js";
import { colourScale, digits, fixed } from "../scales.js";
import { plus } from "./cuts.js";
import { short } from "./labels.js";
import { bar } from "./why.js";

const KEPT = 16; // blocks of one reader
const LETTERS = 40; // of a name

/** @type {Mount} */
export function mount(element, page) {
  const side = /** @type {Side} */ (page.sides.find(({ data }) => data.depth));
  const depth = /** @type {Depth} */ (side.data.depth);
  const { readers, blocks, panels } = depth;
  const size = readers.length * blocks.length;
  const drawing = latest();
  let reader = readers.length - 1;
  const panel = make("select", { onchange: () => void render() }, ...panels.map((name, place) => make("option", { value: place }, short(name, LETTERS))));
  const scale = make("span", {});
  const legend = make("div", { class: "legend" }, panels.length > 1 ? make("label", {}, "of ", panel) : make("span", {}, short(panels[0], LETTERS)), scale, make("span", {}, depth.unit));
  const body = make("div", { class: "with-beside" });
  element.append(make("div", { class: "why depth" }, legend, body, make("ul", { class: "note cut-notes" }, ...depth.notes.map((one) => make("li", {}, one)))));

  async function render() {
    const still = drawing.begin();
    const all = await side.blobs.floats(depth, 2 * panels.length * size);
    if (!still()) return;
    const of = (/** @type {number} */ place) => all.subarray(place * size, (place + 1) * size);
    const [numbers, norms] = [of(Number(panel.value)), of(panels.length + Number(panel.value))];
    const most = numbers.reduce((best, value) => Math.max(best, Math.abs(value) || 0), 0) || 1;
    const choose = async (/** @type {number} */ place) => {
      reader = place;
      await render();
      body.querySelector(`[data-reader="${place}"]`)?.querySelector("button")?.focus(); // it was made anew
    };
    scale.replaceChildren(colourScale(-most, most, diverging()));
    body.replaceChildren(table(depth, numbers, norms, most, reader, choose), largest(depth, numbers, norms, reader));
  }

  return { render: () => void render(), pictured: () => ({ about: short(panels[Number(panel.value)], LETTERS), name: "blocks" }) };
}

/**
 * @param {Depth} depth @param {Float32Array} numbers @param {Float32Array} norms @param {number} most @param {number} reader
 * @param {(reader: number) => Promise<void>} choose
 */
function table({ readers, blocks, unit }, numbers, norms, most, reader, choose) {
  const ramp = diverging();
  const cell = (/** @type {number} */ place) => {
    const number = numbers[place];
    if (Number.isNaN(number)) return make("td", {}); // written later
    const made = make("td", { title: `${unit} ${plus(number)}, norm ${digits(norms[place])}` }, fixed(number, 2));
    const share = (1 + number / most) / 2;
    [made.style.backgroundColor, made.style.color] = [css(ramp, share), inkOn(ramp, share)];
    return made;
  };
  const heads = blocks.map((name) => make("th", { scope: "col" }, short(name, LETTERS)));
  const rows = readers.map((name, row) => {
    const chooses = make("button", { type: "button", class: "plain", "aria-pressed": String(row === reader), onclick: () => void choose(row) }, name);
    const cells = blocks.map((_, column) => cell(row * blocks.length + column));
    return make("tr", { "data-reader": row, class: row === reader ? "chosen" : "" }, make("th", { scope: "row", class: "words" }, chooses), ...cells);
  });
  return make(
    "div",
    { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "What each reader gets of each block" },
    make("table", { class: "numbers keys-by-part" }, make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "words" }, "reader"), ...heads)), make("tbody", {}, ...rows)),
  );
}

/** @param {Depth} depth @param {Float32Array} numbers @param {Float32Array} norms @param {number} reader */
function largest({ readers, blocks, unit }, numbers, norms, reader) {
  const at = (/** @type {number} */ column) => reader * blocks.length + column;
  const order = [...blocks.keys()].filter((column) => !Number.isNaN(numbers[at(column)]));
  order.sort((a, b) => Math.abs(numbers[at(b)]) - Math.abs(numbers[at(a)]));
  const most = Math.abs(numbers[at(order[0])]) || 1;
  const rows = order.slice(0, KEPT).map((column) => {
    const cells = [plus(numbers[at(column)]), digits(norms[at(column)])].map((text) => make("td", {}, text));
    return make("tr", { "data-block": blocks[column] }, make("th", { scope: "row", class: "words" }, short(blocks[column], LETTERS)), make("td", { class: "signed-cell" }, bar(numbers[at(column)] / most)), ...cells);
  });
  const more = order.length - rows.length;
  const heads = [make("th", { scope: "col", class: "words" }, "block"), make("th", { scope: "col" }, spoken(`${unit} as a bar`)), ...[unit, "norm"].map((name) => make("th", { scope: "col" }, name))];
  return make(
    "aside",
    { "aria-label": "Blocks of one reader" },
    make("h2", {}, `Reader ${readers[reader]}`),
    make(
      "div",
      { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "Blocks by size" },
      make("table", { class: "numbers" }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)),
    ),
    more > 0 && make("p", { class: "hint" }, `${more} smaller ones are in the row`),
  );
}
