/**
 * The pictures that stand beside the text, and over them what a query gives to their patches. A click on a patch makes
 * it the query, as the stack of the chosen head reads it.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../data.js").Side} Side
 * @typedef {import("../data.js").Look} Look
 * @typedef {import("../weights.js").Reach} Reach
 * @typedef {[token: number, picture: number, left: number, top: number, right: number, bottom: number]} Patch
 * @typedef {{canvas: HTMLCanvasElement, image: HTMLImageElement, patches: Patch[]}} Panel
 */
import { fit, latest, make, onResize, place, tooltip } from "../canvas.js";
import { css, ink, intensity, sequential } from "../colours.js";
import { said } from "../data.js";
import { colourScale, digits } from "../scales.js";
import { Strip } from "../strip.js";
import { lacking, ranking, short, weightText } from "./labels.js";

const [WIDEST, HIGHEST] = [560, 460]; // pixels of a picture
const LISTED = 6; // heads
const [CLEAREST, DENSEST] = [0.08, 0.85]; // how much of the picture is covered: the smaller a weight, the less

/** @type {import("../types.js").Mount} */
export const mount = (element, page, store) => new PictureView(element, page, store);

class PictureView {
  /** @param {HTMLElement} element @param {Page} page @param {Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    this.state = store.state;
    this.turn = latest();
    /** @type {Side|null} */
    this.side = null;
    /** @type {Look|null} */
    this.look = null;
    /** @type {Reach|null} */
    this.reach = null;
    /** @type {Panel[]} */
    this.panels = [];
    this.query = new Strip("query", store);
    this.title = make("h2", {});
    this.note = make("p", { class: "note" });
    this.scale = make("span", {});
    this.pictures = make("div", { class: "pictures" });
    this.beside = make("aside", { class: "beside" });
    this.most = make("div", { "data-role": "most" });
    element.append(this.query.element, this.title, this.note, make("div", { class: "legend" }, this.scale));
    element.append(make("div", { class: "with-beside" }, this.pictures, this.beside));
    onResize(this.pictures, () => this.#paint());
  }

  /** @param {State} state */
  async render(state) {
    const mine = this.turn.begin();
    const side = this.page.side(state);
    if (side !== this.side) this.#lay(side);
    const query = this.page.query(state);
    this.query.render(side, state.at, [[query, query + 1]]);
    const asked = { ...state, words: false };
    const [look, reach] = await Promise.all([
      this.page.filtered(this.page.shown(state), state.at, state.head, query, asked),
      side.reach(state.at),
      ...this.panels.map(({ image }) => image.decode().catch(() => undefined)),
    ]);
    if (!mine()) return;
    [this.state, this.look, this.reach] = [asked, look, reach];
    this.#say(side, query);
    this.#paint();
    await this.#heads(side, query, mine);
  }

  /** @param {Side} side */
  #lay(side) {
    this.side = side;
    const { pictures = [], patches = [] } = side.data;
    this.panels = pictures.map(({ src }, number) => {
      const image = new Image();
      image.src = src;
      const canvas = make("canvas", { "data-picture": number, role: "img" });
      const panel = { canvas, image, patches: patches.filter(([, picture]) => picture === number) };
      canvas.addEventListener("pointermove", (event) => this.#point(panel, event));
      canvas.addEventListener("pointerleave", () => tooltip.hide());
      canvas.addEventListener("click", (event) => {
        const patch = this.#under(panel, event);
        if (patch) this.store.set({ query: patch[0] });
      });
      return panel;
    });
    this.pictures.replaceChildren(...this.panels.map(({ canvas }) => canvas));
  }

  /** @param {Panel} panel @returns {Patch[]} those that the stack of the chosen head reads */
  #read({ patches }) {
    const { reach } = this;
    return reach ? patches.filter(([token]) => reach.to(token) > reach.from(token)) : [];
  }

  /** @param {Side} side @param {number} query */
  #say(side, query) {
    const { state, look, reach } = this;
    const name = side.name(state.at, state.head);
    const token = make("span", { class: "token query" }, `${side.number(query)} ${short(side.tokens.label[query])}`);
    this.title.replaceChildren("Where ", token, ` looks in the picture, ${name}`);
    const reads = reach !== null && reach.to(query) > reach.from(query);
    const patches = new Set(this.panels.flatMap((panel) => this.#read(panel).map(([one]) => one)));
    const only = look && { ...look, weights: look.weights.map((weight, unit) => (patches.has(unit) ? weight : 0)) };
    const [on, all] = [only, look].map((one) => (one ? one.weights.reduce((sum, weight) => sum + weight, 0) : 0));
    const shares = `${on.toFixed(3)} of its weight is on the picture, ${Math.max(0, all - on).toFixed(3)} elsewhere. `;
    this.note.textContent = reads
      ? shares + lacking(side, state.at, state.head)
      : `${name} does not read this token: choose another one, or click on the picture.`;
    const choose = (/** @type {number} */ token) => this.store.set({ query: token });
    const list = only && reads && on > 0 ? [make("h2", {}, "Patches"), ranking(only, "query", choose)] : [];
    this.beside.replaceChildren(...list, this.most);
  }

  /** The heads that give most to the picture, from this query. @param {Side} side @param {number} query @param {() => boolean} mine */
  async #heads(side, query, mine) {
    const { state, page } = this;
    const patches = this.panels.flatMap((panel) => this.#read(panel).map(([token]) => token));
    const heads = side.headsWith(state.at);
    const looks = await Promise.all(
      heads.map(({ at, head }) => page.filtered(page.shown(state), at, head, query, state)),
    );
    if (!mine()) return;
    const found = heads.map(({ at, head }, place) => {
      const mass = patches.reduce((sum, token) => sum + (looks[place]?.weights[token] ?? 0), 0);
      return { at, head, mass };
    });
    const most = found.filter(({ mass }) => mass > 0).sort((one, other) => other.mass - one.mass).slice(0, LISTED);
    const buttons = most.map(({ at, head, mass }) => {
      const bar = make("i", { class: "share" });
      bar.style.setProperty("--share", String(Math.min(1, mass)));
      const go = () => this.store.set({ at, head });
      const parts = [make("span", { class: "name" }, side.name(at, head)), bar, make("b", {}, said(mass))];
      return make("li", {}, make("button", { type: "button", "data-head": `${at}.${head}`, onclick: go }, ...parts));
    });
    const title = make("h2", {}, "Heads that look most at the picture");
    this.most.replaceChildren(...(buttons.length ? [title, make("ol", { class: "ranking" }, ...buttons)] : []));
  }

  #paint() {
    const drawn = this.panels.map((panel) => cells(this.#read(panel), this.look));
    const most = Math.max(0, ...drawn.flatMap(({ values }) => values)) || 1;
    const share = intensity(most, this.state.log);
    const ramp = sequential();
    this.panels.forEach(({ canvas, image, patches }, number) => {
      const room = Math.min(WIDEST, this.pictures.clientWidth || WIDEST);
      const scale = Math.min(room / image.naturalWidth, HIGHEST / image.naturalHeight) || 1;
      const [wide, high] = [image.naturalWidth * scale, image.naturalHeight * scale];
      const context = fit(canvas, wide, high);
      context.drawImage(image, 0, 0, wide, high);
      const { across, down, values } = drawn[number];
      values.forEach((value, cell) => {
        const [row, column] = [Math.floor(cell / (across.length - 1)), cell % (across.length - 1)];
        const t = Math.min(1, Math.max(0, share(value)));
        context.globalAlpha = CLEAREST + (DENSEST - CLEAREST) * t ** 0.7;
        context.fillStyle = css(ramp, t);
        const [left, top] = [across[column] * wide, down[row] * high];
        context.fillRect(left, top, across[column + 1] * wide - left, down[row + 1] * high - top);
      });
      context.globalAlpha = 1;
      const chosen = patches.find(([token]) => token === this.page.query(this.state));
      if (chosen) {
        const [, , left, top, right, bottom] = chosen;
        context.strokeStyle = ink("query");
        context.lineWidth = 2;
        context.strokeRect(left * wide, top * high, (right - left) * wide, (bottom - top) * high);
      }
      canvas.setAttribute("aria-label", `picture ${number + 1}, the largest weight of a patch ${digits(most)}`);
    });
    this.scale.replaceChildren(colourScale(0, most));
  }

  /** @param {Panel} panel @param {MouseEvent} event @returns {Patch|undefined} the smallest patch under the pointer */
  #under(panel, event) {
    const [x, y] = place(panel.canvas, event);
    const [u, v] = [x / panel.canvas.clientWidth, y / panel.canvas.clientHeight];
    const here = this.#read(panel).filter(([, , left, top, right, bottom]) => {
      return left <= u && u < right && top <= v && v < bottom;
    });
    return here.sort((one, other) => area(one) - area(other))[0];
  }

  /** @param {Panel} panel @param {MouseEvent} event */
  #point(panel, event) {
    const patch = this.#under(panel, event);
    if (!patch || !this.look || !this.side) return tooltip.hide();
    const keep = this.side.keep(this.state.at, this.state.head, this.state);
    const label = this.side.tokens.label[patch[0]];
    tooltip.show(event, [label, ["weight", weightText(this.look, patch[0], this.state, keep)]]);
  }
}

/** @param {Patch} patch */
const area = ([, , left, top, right, bottom]) => (right - left) * (bottom - top);

/**
 * The weights of patches on a grid of all their edges: a patch gives each cell its share, so that those of two sizes
 * add up.
 *
 * @param {Patch[]} patches @param {Look|null} look
 * @returns {{across: number[], down: number[], values: number[]}} edges, and the cells row by row
 */
export function cells(patches, look) {
  const edges = (/** @type {number[]} */ all) => [...new Set(all)].sort((one, other) => one - other);
  const across = edges(patches.flatMap((patch) => [patch[2], patch[4]]));
  const down = edges(patches.flatMap((patch) => [patch[3], patch[5]]));
  const columns = Math.max(0, across.length - 1);
  const values = new Array(columns * Math.max(0, down.length - 1)).fill(0);
  const [column, row] = [across, down].map((all) => new Map(all.map((edge, index) => [edge, index])));
  const at = (/** @type {Map<number, number>} */ places, /** @type {number} */ edge) => places.get(edge) ?? 0;
  for (const patch of patches) {
    const [token, , left, top, right, bottom] = patch;
    const density = (look?.weights[token] ?? 0) / area(patch);
    for (let r = at(row, top); r < at(row, bottom); r++)
      for (let c = at(column, left); c < at(column, right); c++)
        values[r * columns + c] += density * (across[c + 1] - across[c]) * (down[r + 1] - down[r]);
  }
  return { across, down, values };
}
