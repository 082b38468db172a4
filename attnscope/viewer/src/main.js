/** Reads the page's data, shows the frame at once, and gives each view its turn. */
import { make } from "./canvas.js";
import { isDark, onScheme } from "./colours.js";
import { Blobs, Page } from "./data.js";
import { Shell } from "./shell.js";
import { escaped } from "./escaping.js";
import { Store } from "./store.js";
import { tabsOf } from "./tabs.js";

/** @typedef {import("./types.js").State} State */

/** @param {string} id @returns {HTMLElement} */
function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`this page is damaged: it has no ${id}`);
  return found;
}

/** @param {State} state */
function paintTheme({ theme }) {
  const root = document.documentElement;
  root.dataset.theme = theme;
  root.dataset.theme = isDark() ? "dark" : "light";
}

/** Where the command asked for keys in several places, the page begins with all of them. @param {Page} page */
function opening({ data: { open, asked } }) {
  return asked.key && asked.key.positions.length > 1 && !open.includes("keyEnd")
    ? `${open}&group=${encodeURIComponent(asked.key.text)}`
    : open;
}

/** @param {HTMLElement} app */
function start(app) {
  const page = new Page(
    escaped(JSON.parse(element("page").textContent ?? "")),
    new Blobs((blob) => element(`blob-${blob}`).textContent ?? ""),
  );
  const tabs = tabsOf(page.data.sides);
  const store = new Store(opening(page), (state) => {
    const clean = page.clean(state);
    return tabs.some(({ id }) => id === clean.view) ? clean : { ...clean, view: tabs[0].id };
  });
  paintTheme(store.state);
  const shell = new Shell(app, page, store, tabs);
  let asked = 0;
  const render = () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      paintTheme(store.state);
      shell.render(store.state);
    });
  };
  store.subscribe(render);
  onScheme(render);
  shell.frame(store.state); // the first paint; what it shows is unpacked after it
  requestAnimationFrame(() => setTimeout(render));
}

const app = element("app");
try {
  start(app);
} catch (error) {
  app.replaceChildren(make("p", { class: "note", role: "alert" }, `This page cannot be shown: ${error}`));
  throw error;
}
