// Opens pages in one browser and asks axe-core about each; scripts/external/page.py runs it with node.
//   node page.mjs REQUEST.json ANSWERS.json
// REQUEST: {modules, browser: "chrome" | "firefox", executable, cases: [{file, state, width, height, before}]}
// ANSWERS: {version, cases: [{violations: [{id, nodes}], rules, html}]}; before: JavaScript that is run first, a key pressed or a fault planted.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [request, answers] = process.argv.slice(2);
const { modules, browser: kind, executable, cases } = JSON.parse(readFileSync(request, "utf-8"));
const require = createRequire(`${modules}/`);
const { launch } = (await import(pathToFileURL(require.resolve("puppeteer-core")).href)).default;
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf-8");

const QUIET = ["--no-first-run", "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const AS_ROOT = process.getuid?.() === 0 ? ["--no-sandbox"] : [];
const PATIENCE = 30_000; // ms
const DRAWN = `[...document.querySelectorAll("section:not([hidden]) :is(canvas, .piece, table)")].some((one) => one.offsetWidth)
  && document.querySelector("[data-role=weight]").textContent !== ""`;

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** Polled from here: the page's policy forbids what `waitForFunction` evaluates. */
async function until(page, expression) {
  const end = Date.now() + PATIENCE;
  while (!(await page.evaluate(expression))) {
    if (Date.now() > end) throw new Error(`never: ${expression}`);
    await sleep(20);
  }
}

async function asked(page, { file, state, width, height, before }) {
  await page.setViewport({ width, height });
  await page.goto("about:blank");
  await page.goto(`${pathToFileURL(file).href}#${state}`);
  await until(page, DRAWN);
  await sleep(150); // what is written after the first drawing
  await page.evaluate(axe);
  if (before) await page.evaluate(before);
  const { violations, passes } = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })");
  const html = await page.evaluate("'<!doctype html>' + document.documentElement.outerHTML");
  const found = violations.map(({ id, nodes }) => ({ id, nodes: nodes.map((one) => `${one.target} ${one.failureSummary}`) }));
  return { violations: found, rules: passes.length, html };
}

const browser = await launch({ browser: kind, executablePath: executable, headless: true, args: kind === "chrome" ? [...QUIET, ...AS_ROOT] : [] });
try {
  const page = await browser.newPage();
  const found = [];
  for (const one of cases) found.push(await asked(page, one));
  writeFileSync(answers, JSON.stringify({ version: await browser.version(), cases: found }));
} finally {
  await browser.close();
}
