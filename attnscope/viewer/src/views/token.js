/** Which head looks from a query at a key: the mass of each head on the chosen keys, and the heads in its order. */
import { latest, make, spoken } from "../canvas.js";
import { css, inkOn, intensity, shading } from "../colours.js";
import { massOn, said } from "../data.js";
import { HeadGrid, goTo } from "../headgrid.js";
import { roleChip, roleWords } from "../roles.js";
import { colourScale, digits, fixed } from "../scales.js";
import { namedRanges } from "../status.js";
import { Strip } from "../strip.js";

/**
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Page} Page
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../types.js").Side} Side
 * @typedef {import("../headgrid.js").Name} Name
 * @typedef {Name & {mass: number, uniform: number, whole: boolean}} Answer
 */

const RANKED = 20;

/** What each head gives from the query to the chosen keys, as a grid of heads. */
export class Masses {
  /**
   * @param {Page} page @param {Store} store
   * @param {{most: number, answered: () => void, choose?: (name: Name) => void}} options most: width of a cell;
   *   answered: what follows when all heads are known; choose: what a click does instead of opening the head
   */
  constructor(page, store, { most, answered, choose }) {
    this.page = page;
    this.store = store;
    this.answered = answered;
    this.turn = latest();
    /** @type {Map<string, Answer>} */
    this.answers = new Map();
    this.asked = "";
    /** @type {[number, number][]} */
    this.keys = [[0, 1]];
    this.legend = make("div", { class: "legend" });
    const map = make("div", {});
    this.element = make("div", {}, map, this.legend);
    this.grid = new HeadGrid(map, store, {
      label: "Mass of each head on the chosen keys",
      least: 9,
      most: () => most,
      ratio: () => 0.45,
      gap: 2,
      about: (name) => this.#about(name),
      resized: () => this.#paint(),
      choose,
    });
  }

  /** @param {State} state @returns {boolean} whether the grid has other heads than before */
  render(state) {
    const side = this.page.side(state);
    const built = this.grid.show(side, state.at);
    const { view, at, head, heads, theme, log, pin, from, over, metric, ...asked } = state;
    const suggested = state.key === null && [at, head]; // the key is what this head gives most to
    const question = JSON.stringify([asked, side.stackOf(at), suggested]);
    this.grid.select(state);
    if (question !== this.asked) void this.#ask(state);
    else this.#show();
    this.asked = question;
    return built;
  }

  /** Reads layer after layer, so that what is there is shown. @param {State} state */
  async #ask(state) {
    const mine = this.turn.begin();
    const { page } = this;
    const shown = page.shown(state);
    const side = page.sides[shown];
    const query = page.query(state);
    const keys = (await page.keysOf(state)) ?? [[0, 1]];
    if (!mine()) return;
    /** @type {Map<string, Answer>} */
    const answers = new Map();
    for (const at of side.layersWith(state.at)) {
      const heads = side.heads.filter((one) => one.at === at);
      const uniform = await page.uniform(shown, at, query, keys, state);
      const looks = await Promise.all(heads.map(({ head }) => page.filtered(shown, at, head, query, state)));
      if (!mine()) return;
      heads.forEach(({ head }, index) => {
        const look = looks[index];
        if (look) answers.set(`${at}.${head}`, { at, head, mass: massOn(look, keys), uniform, whole: look.whole });
      });
    }
    this.answers = answers;
    this.keys = keys;
    this.#show();
  }

  #show() {
    this.#paint();
    this.answered();
  }

  #paint() {
    const answers = [...this.answers.values()];
    const most = Math.max(0, ...answers.map(({ mass }) => Math.abs(mass))) || 1;
    const { ramp, low, place } = shading(most, intensity(most, false), answers.some(({ mass }) => mass < 0));
    for (const { at, head } of this.grid.side?.heads ?? []) {
      const answer = this.answers.get(`${at}.${head}`);
      const t = place(answer?.mass ?? 0);
      this.grid.fill(
        { at, head },
        answer ? css(ramp, t) : "transparent",
        answer && (answer.whole || answer.mass) ? fixed(answer.mass, 3) : "",
        inkOn(ramp, t),
      );
    }
    const uniform = [...new Set(answers.filter((answer) => answer.uniform).map((answer) => digits(answer.uniform)))];
    const range = uniform.length > 3 ? `${uniform[0]} … ${uniform.at(-1)}` : uniform.join(", ");
    this.legend.replaceChildren(
      colourScale(low, most, ramp),
      make("span", {}, "mass on the chosen keys"),
      make("span", {}, range && `uniform attention ${range}`),
    );
  }

  /** @param {Name} name @returns {(string|[string, string])[]} */
  #about({ at, head }) {
    const side = this.page.side(this.store.state);
    const answer = this.answers.get(`${at}.${head}`);
    /** @type {(string|[string, string])[]} */
    const lines = [[side.name(at, head), roleWords(side.headAt(at, head))]];
    if (!answer) return [...lines, "the page holds no weights in tokens of this head"];
    const query = this.page.query(this.store.state);
    lines.push(`${namedRanges(side, [[query, query + 1]])} → ${namedRanges(side, this.keys)}`);
    return [
      ...lines,
      ["mass", (answer.whole ? "" : "≥ ") + said(answer.mass)],
      ...(answer.uniform ? [/** @type {[string, string]} */ (["uniform", said(answer.uniform)])] : []),
    ];
  }
}

class TokenView {
  /** @param {HTMLElement} element @param {Page} page @param {Store} store */
  constructor(element, page, store) {
    this.page = page;
    this.store = store;
    this.title = make("h2", {});
    this.query = new Strip("query", store);
    this.key = new Strip("key", store);
    this.note = make("p", { class: "note" });
    this.ranked = make("div", { class: "ranked", role: "group", "aria-label": "Heads, strongest first" });
    this.groups = make("div", { class: "groups" });
    this.masses = new Masses(page, store, { most: 112, answered: () => this.#show() });
    element.append(this.query.element, this.key.element, this.groups, this.title, this.note);
    element.append(make("div", { class: "split" }, this.masses.element, this.ranked));
  }

  /** @param {State} state */
  render(state) {
    const side = this.page.side(state);
    if (this.masses.render(state)) this.#groups();
    const query = this.page.query(state);
    this.query.render(side, state.at, [[query, query + 1]]);
    for (const button of this.groups.children)
      if (button.matches("button")) button.setAttribute("aria-pressed", String(button.textContent === state.group));
  }

  /** Keys that the command named. */
  #groups() {
    const buttons = Object.entries(this.page.groups).map(([group, [key]]) => {
      const onclick = () => this.store.set({ key, keyEnd: null, group });
      return make("button", { type: "button", class: "token key", "data-group": group, onclick }, group);
    });
    this.groups.hidden = !buttons.length || this.page.shown(this.store.state) > 0;
    this.groups.replaceChildren(make("span", { class: "muted" }, "asked for"), ...buttons);
  }

  #show() {
    const { state } = this.store;
    const side = this.page.side(state);
    const { keys, answers } = this.masses;
    const query = this.page.query(state);
    this.key.render(side, state.at, keys);
    this.title.replaceChildren(
      "Which head looks from ",
      make("span", { class: "token query" }, namedRanges(side, [[query, query + 1]])),
      ...(state.query === null ? [" (suggested)"] : []),
      " at ",
      make("span", { class: "token key" }, namedRanges(side, keys)),
      ...(state.key === null ? [" (suggested)"] : []),
      "?",
    );
    const chosen =
      state.key === null
        ? `No key was chosen: this one has the largest weight in ${side.name(state.at, state.head)}. `
        : "";
    const some = [...answers.values()].some(({ whole }) => !whole);
    const least = some ? "This page has only the strongest keys of each query: masses are lower bounds. " : "";
    const causal = side.stackOf(state.at) === "decoder" && keys[0][0] > query;
    const later = causal ? "The key comes after the query: no head can see it." : "";
    const none = answers.size && ![...answers.values()].some(({ mass }) => mass > 0) && !later;
    this.note.textContent =
      chosen + least + later + (none ? "No head has a weight for these keys in this page." : "");
    this.note.hidden = !this.note.textContent;
    this.#rank(side);
  }

  /** @param {Side} side */
  #rank(side) {
    const { at, head } = this.store.state;
    const known = [...this.masses.answers.values()].filter(({ whole, mass }) => whole || mass > 0);
    const answers = known.sort((a, b) => b.mass - b.uniform - (a.mass - a.uniform)).slice(0, RANKED);
    const rows = answers.map((answer) => {
      const name = make("button", { type: "button", class: "plain" }, side.name(answer.at, answer.head));
      const bar = make("i", { class: "bar" });
      bar.style.setProperty("--share", String(Math.min(1, answer.mass)));
      bar.style.setProperty("--uniform", String(answer.uniform));
      const cells = [
        make("td", { class: "words" }, name),
        make("td", { class: "words wide" }, bar),
        make("td", { class: "chosen" }, (answer.whole ? "" : "≥ ") + said(answer.mass)),
        make("td", { class: "muted" }, answer.uniform ? said(answer.uniform) : ""),
        make("td", { class: "words" }, roleChip(side.headAt(answer.at, answer.head))),
      ];
      const selected = String(answer.at === at && answer.head === head);
      return make("tr", { "data-head": `${answer.at}.${answer.head}`, "aria-selected": selected }, ...cells);
    });
    const headings = ["head", spoken("mass as a bar"), "mass", "uniform", "role"].map((name, place) =>
      make("th", { scope: "col", class: [0, 1, 4].includes(place) ? "words" : "" }, name),
    );
    const body = make("tbody", {}, ...rows);
    body.addEventListener("click", (event) => {
      const name = /** @type {Element} */ (event.target).closest("tr")?.dataset.head?.split(".").map(Number);
      if (name) goTo(this.store, { at: name[0], head: name[1] }, event);
    });
    this.ranked.replaceChildren(
      make("table", { class: "heads" }, make("thead", {}, make("tr", {}, ...headings)), body),
    );
  }
}

/** @type {import("../types.js").Mount} */
export const mount = (element, page, store) => new TokenView(element, page, store);
