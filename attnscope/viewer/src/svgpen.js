/**
 * A pen that writes SVG where a canvas's context paints: as much of it as the page's drawings use. What is drawn with it
 * stays text and lines in the saved file.
 */

/** @param {unknown} text @returns {string} as XML takes it, without the signs that it has none for */
export const xml = (text) =>
  String(text)
    .replace(/[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\u{10000}-\u{10FFFF}]/gu, "\uFFFD")
    .replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** @param {number} value */
const n = (value) => String(Math.round(value * 100) / 100);

const ANCHORS = { left: "start", center: "middle", right: "end" };
const STATE = /** @type {const} */ ([
  ...["fillStyle", "strokeStyle", "lineWidth", "globalAlpha", "font", "textAlign", "textBaseline", "dash", "opened"],
]);
const MOST_CELLS = 2500; // of a raster that is written cell by cell: a larger one is a picture inside the file

export class SvgPen {
  /** @param {number} prefix of the names of what is defined, one for each drawing of a file */
  constructor(prefix) {
    this.prefix = prefix;
    /** @type {string[]} */
    this.parts = [];
    /** @type {Record<string, unknown>[]} */
    this.kept = [];
    this.defined = 0;
    this.fillStyle = /** @type {any} */ ("#000");
    this.strokeStyle = "#000";
    this.lineWidth = 1;
    this.globalAlpha = 1;
    this.font = "10px sans-serif";
    this.textAlign = "left";
    this.textBaseline = "alphabetic";
    this.imageSmoothingEnabled = true;
    this.dash = "";
    this.opened = 0;
    this.path = "";
  }

  save() {
    this.kept.push(Object.fromEntries(STATE.map((name) => [name, Reflect.get(this, name)])));
    this.opened = 0;
  }

  restore() {
    this.parts.push("</g>".repeat(this.opened));
    Object.assign(this, this.kept.pop());
  }

  /** @param {string} attributes */
  #open(attributes) {
    this.parts.push(`<g ${attributes}>`);
    this.opened++;
  }

  /** @param {number} x @param {number} y */
  translate(x, y) {
    this.#open(`transform="translate(${n(x)} ${n(y)})"`);
  }

  /** @param {number} angle */
  rotate(angle) {
    this.#open(`transform="rotate(${n((angle * 180) / Math.PI)})"`);
  }

  beginPath() {
    this.path = "";
  }

  /** @param {number} x @param {number} y */
  moveTo(x, y) {
    this.path += `M${n(x)} ${n(y)}`;
  }

  /** @param {number} x @param {number} y */
  lineTo(x, y) {
    this.path += `L${n(x)} ${n(y)}`;
  }

  /** @param {number[]} points */
  bezierCurveTo(...points) {
    this.path += `C${points.map(n).join(" ")}`;
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  rect(x, y, width, height) {
    this.path += `M${n(x)} ${n(y)}h${n(width)}v${n(height)}h${n(-width)}z`;
  }

  clip() {
    const name = this.#name();
    this.parts.push(`<clipPath id="${name}"><path d="${this.path}"/></clipPath>`);
    this.#open(`clip-path="url(#${name})"`);
  }

  #name() {
    return `p${this.prefix}-${++this.defined}`;
  }

  stroke() {
    this.parts.push(`<path d="${this.path}" fill="none"${this.#stroked()}/>`);
  }

  fill() {
    this.parts.push(`<path d="${this.path}z" fill="${xml(this.fillStyle)}"${this.#alpha()}/>`);
  }

  #stroked() {
    const dash = this.dash && ` stroke-dasharray="${this.dash}"`;
    return ` stroke="${xml(this.strokeStyle)}" stroke-width="${n(this.lineWidth)}"${dash}${this.#alpha()}`;
  }

  #alpha() {
    return this.globalAlpha < 1 ? ` opacity="${n(this.globalAlpha)}"` : "";
  }

  /** @param {number[]} lengths */
  setLineDash(lengths) {
    this.dash = lengths.join(" ");
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  strokeRect(x, y, width, height) {
    this.parts.push(`<rect ${box(x, y, width, height)} fill="none"${this.#stroked()}/>`);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  fillRect(x, y, width, height) {
    this.parts.push(`<rect ${box(x, y, width, height)} fill="${xml(this.fillStyle)}"${this.#alpha()}/>`);
  }

  /** @param {HTMLCanvasElement} tile @returns {string} a fill of it, repeated */
  createPattern(tile) {
    const name = this.#name();
    const size = `width="${tile.width}" height="${tile.height}"`;
    const image = `<image ${size} href="${tile.toDataURL()}"/>`;
    this.parts.push(`<pattern id="${name}" ${size} patternUnits="userSpaceOnUse">${image}</pattern>`);
    return `url(#${name})`;
  }

  /** @param {HTMLCanvasElement|HTMLImageElement} image @param {number} x @param {number} y @param {number} width @param {number} height */
  drawImage(image, x, y, width, height) {
    const canvas = image instanceof HTMLCanvasElement ? image : null;
    if (canvas && canvas.width * canvas.height <= MOST_CELLS) return this.#cells(canvas, x, y, width, height);
    const href = canvas ? canvas.toDataURL() : /** @type {HTMLImageElement} */ (image).src;
    const style = canvas ? ' style="image-rendering:pixelated"' : "";
    const what = `${box(x, y, width, height)} preserveAspectRatio="none"${style}${this.#alpha()}`;
    this.parts.push(`<image ${what} href="${xml(href)}"/>`);
  }

  /** A small raster as rectangles, which no program smooths. @param {HTMLCanvasElement} canvas @param {number[]} place */
  #cells(canvas, ...[x, y, width, height]) {
    const { width: columns, height: rows } = canvas;
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const { data } = pen.getImageData(0, 0, columns, rows);
    const [wide, high] = [width / columns, height / rows];
    const cells = [];
    for (let at = 0; at < rows * columns; at++) {
      const [red, green, blue, alpha] = data.subarray(4 * at, 4 * at + 4);
      if (!alpha) continue;
      const [left, top] = [x + (at % columns) * wide, y + Math.floor(at / columns) * high];
      cells.push(`<rect ${box(left, top, wide, high)} fill="rgb(${red},${green},${blue})"/>`);
    }
    this.parts.push(`<g shape-rendering="crispEdges"${this.#alpha()}>${cells.join("")}</g>`);
  }

  /** @param {string} text @returns {{width: number}} about */
  measureText(text) {
    return { width: text.length * 0.6 * parseFloat(this.font.match(/[\d.]+px/)?.[0] ?? "10") };
  }

  /** @param {string} text @param {number} x @param {number} y */
  fillText(text, x, y) {
    const [, weight = "", size = "10", family = "sans-serif"] = /(\d00 )?([\d.]+)px (.*)/.exec(this.font) ?? [];
    const middle = this.textBaseline === "middle" ? Number(size) * 0.35 : 0;
    const anchor = ANCHORS[/** @type {"left"} */ (this.textAlign)] ?? "start";
    const font = `font-size="${size}" font-family="${xml(family)}"${weight && ` font-weight="${weight.trim()}"`}`;
    const what = `x="${n(x)}" y="${n(y + middle)}" text-anchor="${anchor}" ${font} fill="${xml(this.fillStyle)}"`;
    this.parts.push(`<text ${what}${this.#alpha()} xml:space="preserve">${xml(text)}</text>`);
  }

  /** @returns {string} what was drawn */
  get drawing() {
    return this.parts.join("") + "</g>".repeat(this.opened);
  }
}

/** @param {number} x @param {number} y @param {number} width @param {number} height */
export const box = (x, y, width, height) => `x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}"`;
