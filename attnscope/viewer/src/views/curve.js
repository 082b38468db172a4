/**
 * What is lost by layer, or by window of layers, as a curve beside the same weights on other keys. A button over each step of it says what
 * its cut cost; the chosen one is the one that Tab reaches, and arrows go along.
 *
 * @typedef {import("../types.js").Cuts} Cuts
 * @typedef {{name: string, colour: string, mean: (number|null)[], low: (number|null)[], high: (number|null)[]}} Other
 */
import { fit, make, onResize, tooltip } from "../canvas.js";
import { ink, several } from "../colours.js";
import { paintedBy } from "../picture.js";
import { digits } from "../scales.js";
import { line, ticks } from "./cells.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [54, 12, 10, 40]; // pixels beside the curve
const HEIGHT = 250;
const MOST = 900; // pixels of its width
const STEPS = 5; // of the scale, about
const FONT = 11;

export class Curve {
  /**
   * @param {HTMLElement} parent @param {Cuts} cuts
   * @param {(place: number) => (string|[string, string])[]} about a cut @param {(place: number) => void} choose
   */
  constructor(parent, cuts, about, choose) {
    this.cuts = cuts;
    this.about = about;
    this.choose = choose;
    this.chosen = -1;
    this.canvas = make("canvas", { role: "img", "aria-label": `${cuts.unit} lost by layer; the table has the numbers` });
    this.buttons = cuts.rows.map((_, place) =>
      make("button", { type: "button", "data-cut": place, tabindex: "-1", "aria-label": said(about(place)) }),
    );
    const label = cuts.over === "layers" ? "Effect of each layer" : "Effect of each window of layers";
    const steps = make("div", { class: "curve-steps", role: "group", "aria-label": label }, ...this.buttons);
    this.element = make("div", { class: "curve" }, this.canvas, steps);
    parent.append(this.element);
    paintedBy(this.canvas, (pen) => this.#paint(pen));
    this.#listen(steps);
    onResize(this.element, () => this.draw());
  }

  /** @param {HTMLElement} steps */
  #listen(steps) {
    const place = (/** @type {Event} */ event) =>
      Number(/** @type {Element} */ (event.target).closest("[data-cut]")?.getAttribute("data-cut") ?? -1);
    steps.addEventListener("pointermove", (event) => {
      if (place(event) >= 0) tooltip.show(event, this.about(place(event)));
    });
    steps.addEventListener("pointerleave", () => tooltip.hide());
    steps.addEventListener("focusin", (event) => {
      const button = /** @type {HTMLElement} */ (event.target);
      if (!button.matches(":focus-visible")) return;
      const { left, top } = button.getBoundingClientRect();
      tooltip.show({ clientX: left, clientY: top }, this.about(place(event)));
    });
    steps.addEventListener("focusout", () => tooltip.hide());
    steps.addEventListener("click", (event) => place(event) >= 0 && this.choose(place(event)));
    steps.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = Math.min(this.buttons.length - 1, Math.max(0, place(event) + step));
      this.choose(next);
    });
  }

  /** @param {number} place */
  select(place) {
    const moved = place !== this.chosen;
    this.chosen = place;
    this.buttons.forEach((button, at) => {
      button.tabIndex = at === Math.max(0, place) ? 0 : -1;
      if (at === place) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    if (moved && this.element.contains(document.activeElement)) this.buttons[place]?.focus({ preventScroll: true });
    if (moved) this.draw();
  }

  /** @returns {Other|null} the same weights on other keys, where any cut is compared with them */
  get #others() {
    const { rows } = this.cuts;
    if (rows.every((row) => row.null_permuted === null)) return null;
    const [mean, low, high] = [rows.map((row) => row.null_permuted), rows.map((row) => row.low_permuted), rows.map((row) => row.high_permuted)];
    return { name: "same weights on other keys", colour: several(1), mean, low, high };
  }

  get #intervals() {
    return this.cuts.rows.some(({ low_all, high_all }) => low_all !== null || high_all !== null);
  }

  /** @returns {HTMLElement[]} what the lines are */
  legend() {
    const swatch = (/** @type {string} */ colour, /** @type {string} */ text) => {
      const mark = make("i", { class: "stroke" });
      mark.style.backgroundColor = colour;
      return make("span", { class: "swatch" }, mark, text);
    };
    const own = swatch(several(0), `these keys${this.#intervals ? ", with 95 % interval of all at once" : ""}`);
    const others = this.#others;
    return others ? [own, swatch(others.colour, `${others.name}: mean, 95 %`)] : [own];
  }

  draw() {
    const width = Math.min(MOST, this.element.clientWidth);
    if (!width) return;
    this.width = width;
    this.#paint(fit(this.canvas, width, HEIGHT));
    const step = this.#step;
    this.buttons.forEach((button, place) => {
      button.style.left = `${LEFT + place * step}px`;
      button.style.width = `${step}px`;
      button.style.top = `${TOP}px`;
      button.style.height = `${HEIGHT - TOP - BOTTOM}px`;
    });
  }

  get #step() {
    return ((this.width ?? 0) - LEFT - RIGHT) / Math.max(1, this.cuts.rows.length);
  }

  /** @param {CanvasRenderingContext2D} pen or what writes SVG instead */
  #paint(pen) {
    const { rows } = this.cuts;
    const others = this.#others;
    const [low, high, every] = scaleOf([
      ...rows.flatMap((row) => [row.effect, row.low_all, row.high_all]),
      ...(others ? [...others.low, ...others.mean, ...others.high] : []),
    ]);
    const x = (/** @type {number} */ place) => LEFT + (place + 0.5) * this.#step;
    const y = (/** @type {number} */ value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.#axes(pen, low, high, every, x, y);
    if (others) {
      band(pen, others.colour, others.low, others.high, x, y);
      stroke(pen, others.colour, others.mean, x, y, [5, 3]);
    }
    if (this.#intervals) band(pen, several(0), rows.map((row) => row.low_all ?? row.effect), rows.map((row) => row.high_all ?? row.effect), x, y);
    stroke(pen, several(0), rows.map(({ effect }) => effect), x, y, []);
    rows.forEach(({ effect }, place) => {
      if (effect === null) return;
      const size = place === this.chosen ? 5 : 2.5;
      pen.fillStyle = several(0);
      pen.fillRect(x(place) - size, y(effect) - size, 2 * size, 2 * size);
    });
  }

  /**
   * @param {CanvasRenderingContext2D} pen @param {number} low @param {number} high @param {number} every
   * @param {(place: number) => number} x @param {(value: number) => number} y
   */
  #axes(pen, low, high, every, x, y) {
    const right = (this.width ?? 0) - RIGHT;
    pen.font = `${FONT}px ${ink("sans")}`;
    pen.lineWidth = 1;
    [pen.textAlign, pen.textBaseline] = ["right", "middle"];
    for (let tick = Math.ceil(low / every - 1e-9); tick * every <= high + 1e-9; tick++) {
      pen.strokeStyle = tick === 0 ? ink("muted") : ink("line");
      line(pen, [LEFT, Math.round(y(tick * every)) + 0.5], [right, Math.round(y(tick * every)) + 0.5]);
      pen.fillStyle = ink("muted");
      pen.fillText(digits(tick * every), LEFT - 7, y(tick * every));
    }
    pen.textAlign = "center";
    const { rows, over } = this.cuts;
    const named = ticks(30 / this.#step);
    const numbers = rows.map(({ layer }) => layer);
    for (let place = 0; place < rows.length; place += Math.max(1, named))
      pen.fillText(`L${numbers[place]}`, x(place), HEIGHT - BOTTOM + 13);
    const what = over === "layers" ? "layer" : "layer in the middle of a window";
    pen.fillText(what, (LEFT + right) / 2, HEIGHT - 9);
  }
}

/** @param {(number|null)[]} values @returns {[low: number, high: number, every: number]} a scale that holds them and 0 */
export function scaleOf(values) {
  const found = values.filter((one) => one !== null);
  const [least, most] = [Math.min(0, ...found), Math.max(0, ...found)];
  const every = most > least ? tenths((most - least) / STEPS) : 1;
  return [Math.floor(least / every + 1e-9) * every, Math.max(1, Math.ceil(most / every - 1e-9)) * every, every];
}

/** @param {number} least above 0 @returns {number} 1, 2 or 5 times a power of ten: the first that is not smaller */
function tenths(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * /** @type {number} */ ([1, 2, 5, 10].find((digit) => digit * power >= least * (1 - 1e-9)));
}

/** @param {(string|[string, string])[]} lines */
const said = (lines) => lines.map((one) => (Array.isArray(one) ? one.join(" ") : one)).join(", ");

/**
 * @param {CanvasRenderingContext2D} pen @param {string} colour @param {(number|null)[]} values
 * @param {(place: number) => number} x @param {(value: number) => number} y @param {number[]} dash
 */
function stroke(pen, colour, values, x, y, dash) {
  [pen.strokeStyle, pen.lineWidth] = [colour, 1.8];
  pen.setLineDash(dash);
  values.forEach((value, place) => {
    const before = values[place - 1];
    if (value !== null && before !== null && before !== undefined) line(pen, [x(place - 1), y(before)], [x(place), y(value)]);
  });
  pen.setLineDash([]);
}

/**
 * @param {CanvasRenderingContext2D} pen @param {string} colour @param {(number|null)[]} low @param {(number|null)[]} high
 * @param {(place: number) => number} x @param {(value: number) => number} y
 */
function band(pen, colour, low, high, x, y) {
  pen.globalAlpha = 0.16;
  pen.fillStyle = colour;
  for (let place = 1; place < low.length; place++) {
    const corners = [low[place - 1], low[place], high[place], high[place - 1]];
    if (corners.some((one) => one === null)) continue;
    const [a, b, c, d] = /** @type {number[]} */ (corners);
    pen.beginPath();
    pen.moveTo(x(place - 1), y(a));
    pen.lineTo(x(place), y(b));
    pen.lineTo(x(place), y(c));
    pen.lineTo(x(place - 1), y(d));
    pen.fill();
  }
  pen.globalAlpha = 1;
}
