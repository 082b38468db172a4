/** The dialog that saves what is seen, as SVG or PNG, and has what makes it again to be copied. */
import { make } from "./canvas.js";
import { titled } from "./dialogs.js";
import { drawn } from "./picture.js";
import { recipes } from "./recipes.js";

/**
 * @typedef {import("./types.js").State} State
 * @typedef {import("./types.js").Page} Page
 * @typedef {import("./types.js").Store} Store
 */

const SHARPER = 2; // pixels of a PNG for each of the screen
const [LONGEST, MOST] = [16_000, 100e6]; // of a side, and of all: what browsers draw

export class ShareDialog {
  /** @param {Page} page @param {Store} store @param {() => {panel: HTMLElement, about: string, name?: string}} seen what is on screen */
  constructor(page, store, seen) {
    this.page = page;
    this.store = store;
    this.seen = seen;
    this.element = make("dialog", { class: "share-dialog", "aria-label": "Save and copy" });
    const save = (/** @type {"svg"|"png"} */ kind) =>
      make("button", { type: "button", "data-save": kind, onclick: () => void this.save(kind) }, `Save as ${kind.toUpperCase()}`);
    this.saves = make("div", { class: "saves" }, save("svg"), save("png"));
    this.told = make("p", { class: "note", role: "status" });
    this.list = make("div", {});
    this.element.append(titled(this.element, "Save and copy"), this.saves, this.told, this.list);
  }

  async open() {
    if (this.element.open) return;
    const { page, store } = this;
    const keys = await page.keysOf(store.state);
    store.flush();
    const framed = parent !== window; // its address is nobody else's
    const inNotebook = location.href === "about:srcdoc"; // which lets nothing out
    this.saves.hidden = inNotebook;
    this.told.textContent = inNotebook ? 'In a notebook, seen.page().save("page.html") writes a page that can save pictures.' : "";
    const rows = [...recipes(page, store.state, keys), ...(framed ? [] : [{ name: "Address of what is seen", text: location.href }])];
    this.list.replaceChildren(...rows.map((row) => this.#row(row)));
    this.element.showModal();
  }

  /** @param {import("./recipes.js").Recipe} recipe */
  #row({ name, text }) {
    const code = make("pre", { class: "token", tabindex: 0, "data-recipe": name }, text);
    const copy = make("button", { type: "button", "aria-label": `Copy: ${name}`, onclick: () => void this.#copy(text, code) }, "Copy");
    return make("section", { "aria-label": name }, make("h3", {}, name, copy), code);
  }

  /** @param {string} text @param {HTMLElement} code */
  async #copy(text, code) {
    try {
      await navigator.clipboard.writeText(text);
      this.told.textContent = "Copied.";
    } catch {
      getSelection()?.selectAllChildren(code);
      this.told.textContent = document.execCommand("copy") ? "Copied." : "Selected: copy it with Ctrl+C.";
    }
  }

  /** @param {"svg"|"png"} kind */
  async save(kind) {
    const { title, command, version } = this.page.data;
    const { panel, about, name: own } = this.seen();
    const made = `attnscope ${version}${command ? `: ${command}` : ""}`;
    const { svg, width, height } = drawn(panel, { title, about, made });
    const plain = new Blob([svg], { type: "image/svg+xml" });
    const blob = kind === "svg" ? plain : await painted(svg, width, height);
    const { view, at, head } = this.store.state;
    const name = own ?? this.page.side(this.store.state).name(at, head).replaceAll(" ", "-");
    const link = make("a", { download: `attnscope-${view}-${name}.${kind}`, href: URL.createObjectURL(blob) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    this.told.textContent = `Saved ${link.download}.`;
  }
}

/** @param {string} svg @param {number} width @param {number} height @returns {Promise<Blob>} as PNG */
async function painted(svg, width, height) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const scale = Math.min(SHARPER, LONGEST / Math.max(width, height), Math.sqrt(MOST / (width * height)));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) =>
    canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("the picture is too large"))), "image/png"),
  );
}
