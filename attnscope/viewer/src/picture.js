/**
 * What a view shows as one SVG drawing: its texts as text, its boxes as boxes, and its canvases as what draws them says,
 * else as pictures inside the file. Controls are left out: the line above the drawing says what they chose.
 */
import { SvgPen, box, xml } from "./svgpen.js";

/** @type {WeakMap<HTMLCanvasElement, (pen: any) => void>} what draws a canvas again, with any pen */
const painters = new WeakMap();
const LEFT_OUT = ".spoken, select, input, .choice, [data-role=all-heads], .hint, dialog, [hidden]";
const [EDGE, HEAD, LINE] = [16, 52, 17]; // CSS pixels: the margin, the title's room, a line of it

/** @param {HTMLCanvasElement} canvas @param {(pen: any) => void} paint */
export const paintedBy = (canvas, paint) => painters.set(canvas, paint);

/**
 * @param {HTMLElement} panel a view that is on screen @param {{title: string, about: string, made: string}} said
 * @returns {{svg: string, width: number, height: number}}
 */
export function drawn(panel, { title, about, made }) {
  const root = getComputedStyle(document.documentElement);
  const colour = (/** @type {string} */ name) => root.getPropertyValue(`--${name}`).trim();
  const { left, top, width: wide } = panel.getBoundingClientRect();
  const width = Math.ceil(wide + 2 * EDGE);
  const height = Math.ceil(panel.scrollHeight + HEAD + 2 * EDGE);
  const sketch = new Sketch(left - EDGE, top - HEAD - EDGE);
  for (const child of panel.children) sketch.element(/** @type {HTMLElement} */ (child));
  const font = `font-family="${xml(colour("sans"))}"`;
  const lines = [
    `<text x="${EDGE}" y="${EDGE + LINE - 4}" font-size="14" font-weight="600" ${font} fill="${colour("ink")}">${xml(title)}</text>`,
    `<text x="${EDGE}" y="${EDGE + 2 * LINE}" font-size="12" ${font} fill="${colour("muted")}">${xml(about)}</text>`,
  ];
  const svg = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`,
    `<title>${xml(title)}</title><desc>${xml(made)}</desc>`,
    `<rect width="100%" height="100%" fill="${colour("paper")}"/>`,
    ...lines,
    ...sketch.parts,
    "</svg>\n",
  ].join("\n");
  return { svg, width, height };
}

class Sketch {
  /** @param {number} x @param {number} y of the drawing's corner in the window */
  constructor(x, y) {
    this.x = x;
    this.y = y;
    /** @type {string[]} */
    this.parts = [];
    this.clips = 0;
  }

  /** @param {HTMLElement} element */
  element(element) {
    const style = getComputedStyle(element);
    const bounds = element.getBoundingClientRect();
    if (element.matches(LEFT_OUT) || style.visibility === "hidden" || !(bounds.width && bounds.height)) return;
    this.#box(element, style, bounds);
    if (element instanceof HTMLCanvasElement) return this.#canvas(element, bounds);
    const clipped = style.overflowX !== "visible";
    if (clipped) {
      const name = `clip-${++this.clips}`;
      this.parts.push(`<clipPath id="${name}"><rect ${this.#at(bounds)}/></clipPath><g clip-path="url(#${name})">`);
    }
    for (const child of element.childNodes) {
      if (child instanceof HTMLElement) this.element(child);
      else if (child instanceof Text && child.data.trim()) this.#text(child, style);
    }
    if (clipped) this.parts.push("</g>");
  }

  /** @param {DOMRect} bounds */
  #at({ left, top, width, height }) {
    return box(left - this.x, top - this.y, width, height);
  }

  /** @param {HTMLElement} element @param {CSSStyleDeclaration} style @param {DOMRect} bounds */
  #box(element, style, bounds) {
    const filled = !/^rgba\(.*, 0\)$|^transparent$/.test(style.backgroundColor);
    const edge = parseFloat(style.borderTopWidth);
    const edged = edge > 0 && style.borderTopWidth === style.borderLeftWidth && style.borderTopStyle === "solid";
    const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, bounds.height / 2);
    if (filled || edged) {
      const stroke = edged ? ` stroke="${xml(style.borderTopColor)}" stroke-width="${edge}"` : "";
      const fill = filled ? xml(style.backgroundColor) : "none";
      this.parts.push(`<rect ${this.#at(bounds)} rx="${radius}" fill="${fill}"${stroke}/>`);
    }
    if (element.matches(".made.first")) {
      const [width, height] = element.matches(".rows > *") ? [bounds.width, 2] : [2, bounds.height];
      const colour = style.getPropertyValue("--made").trim();
      this.parts.push(`<rect ${this.#at(new DOMRect(bounds.left, bounds.top, width, height))} fill="${xml(colour)}"/>`);
    }
    if (element.matches(".gradient")) this.#gradient(style, bounds);
    if (element.matches(".share, .bar")) this.#share(style, bounds, element.matches(".bar") ? "--key" : "--accent");
    const { from, box: one = "" } = element.dataset;
    for (const [place, [colour, weight, share]] of bandsOf(element).entries()) {
      const width = Number(one) || bounds.width * weight;
      const along = one ? place * (width + 1) : 0;
      const left = from === "right" ? bounds.right - width - along : bounds.left + along;
      this.parts.push(`<rect ${this.#at(new DOMRect(left, bounds.top, width, bounds.height))} fill="${xml(colour)}" opacity="${share}"/>`);
    }
  }

  /** @param {CSSStyleDeclaration} style @param {DOMRect} bounds @param {string} name of its colour */
  #share(style, bounds, name) {
    const width = bounds.width * Math.min(1, Number(style.getPropertyValue("--share")) || 0);
    const fill = style.getPropertyValue(name).trim();
    this.parts.push(`<rect ${this.#at(new DOMRect(bounds.left, bounds.top, width, bounds.height))} fill="${xml(fill)}"/>`);
  }

  /** @param {CSSStyleDeclaration} style @param {DOMRect} bounds */
  #gradient(style, bounds) {
    const colours = style.backgroundImage.match(/rgb\([^)]*\)/g) ?? [];
    const name = `ramp-${++this.clips}`;
    const stops = colours.map((one, place) => `<stop offset="${place / (colours.length - 1)}" stop-color="${xml(one)}"/>`);
    this.parts.push(`<linearGradient id="${name}">${stops.join("")}</linearGradient>`);
    this.parts.push(`<rect ${this.#at(bounds)} fill="url(#${name})"/>`);
  }

  /** @param {HTMLCanvasElement} canvas @param {DOMRect} bounds */
  #canvas(canvas, bounds) {
    const paint = painters.get(canvas);
    if (!paint) {
      this.parts.push(`<image ${this.#at(bounds)} preserveAspectRatio="none" href="${canvas.toDataURL()}"/>`);
      return;
    }
    const pen = new SvgPen(++this.clips);
    paint(pen);
    this.parts.push(`<g transform="translate(${bounds.left - this.x} ${bounds.top - this.y})">${pen.drawing}</g>`);
  }

  /** Line by line, as it is broken on the screen. @param {Text} node @param {CSSStyleDeclaration} style */
  #text(node, style) {
    const size = parseFloat(style.fontSize);
    const font = `font-size="${size}" font-family="${xml(style.fontFamily)}" font-weight="${style.fontWeight}"`;
    for (const { text, left, top, height, width } of linesOf(node)) {
      const [x, y] = [left - this.x, top - this.y + height / 2 + 0.35 * size];
      const fits = text.length > 1 ? ` textLength="${width.toFixed(1)}" lengthAdjust="spacingAndGlyphs"` : "";
      const what = `x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${font} fill="${xml(style.color)}"${fits}`;
      this.parts.push(`<text ${what} xml:space="preserve">${xml(text)}</text>`);
    }
  }
}

/** @param {HTMLElement} element @returns {[colour: string, weight: number, share: number][]} of the bands beside a token */
const bandsOf = ({ dataset }) => (dataset.bands ? JSON.parse(dataset.bands) : []);

/** @param {Text} node */
function linesOf(node) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const rects = [...range.getClientRects()].filter(({ width }) => width);
  if (rects.length === 0) return [];
  if (rects.length === 1) {
    const { left, top, width, height } = rects[0];
    return [{ text: node.data.replace(/\n/g, " "), left, top, width, height }];
  }
  /** @type {{text: string, left: number, top: number, width: number, height: number}[]} */
  const lines = [];
  for (let at = 0; at < node.length; at++) {
    range.setStart(node, at);
    range.setEnd(node, at + 1);
    const { left, top, right, height, width } = range.getBoundingClientRect();
    const line = lines.at(-1);
    if (!width) continue;
    if (line && Math.abs(line.top - top) < 2) Object.assign(line, { text: line.text + node.data[at], width: right - line.left });
    else lines.push({ text: node.data[at], left, top, width, height });
  }
  return lines;
}
