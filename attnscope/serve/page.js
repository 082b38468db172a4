/**
 * The page that asks: a form, what was asked before, and the answer in a frame that may run its script and nothing else.
 * The token comes behind `#` of the address, is taken out of it, and goes into a header of every question.
 */
(() => {
  /**
   * @typedef {Record<string, string|number|boolean>} Question as attnscope/serve/page.py has it
   * @typedef {{question: Question, label: string, page: Blob, frame: HTMLIFrameElement}} Entry
   * @typedef {{stage?: unknown, done?: unknown, total?: unknown, unit?: unknown, said?: unknown, failed?: unknown, page?: unknown}} Line
   */

  const KEPT = 20; // answers in the list: the browser holds their pages
  const HELLO = "attnscope/live/1";
  const TOKEN = "attnscope-token";
  const COMPARED = ["text", "model"];

  /** @template {HTMLElement} T @param {string} selector @returns {T} */
  const element = (selector) => /** @type {T} */ (document.querySelector(selector));
  /** @type {HTMLFormElement} */
  const form = element("#question");
  const [status, list, shown, stop] = [element("#status"), element("#earlier"), element("#shown"), element("#stop")];
  /** @type {Entry[]} */
  let entries = [];
  /** @type {Entry|null} */
  let current = null;
  /** @type {Entry|null} */
  let beside = null; // to be compared with the next that is chosen
  /** @type {AbortController|null} */
  let asking = null;

  const token = location.hash.slice(1) || sessionStorage.getItem(TOKEN) || "";
  sessionStorage.setItem(TOKEN, token);
  history.replaceState(null, "", location.pathname);

  /** @param {string} text @param {boolean} [failed] */
  function tell(text, failed = false) {
    status.textContent = text;
    status.classList.toggle("failed", failed);
  }

  /** @param {string} path @param {RequestInit} [how] */
  function fetched(path, how = {}) {
    return fetch(path, { ...how, headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" } });
  }

  /** @param {string} name @returns {any} */
  const field = (name) => form.elements.namedItem(name);

  /** What the form asks; what says nothing is left out. @returns {Promise<Question>} */
  async function asked() {
    /** @type {Question} */
    const question = { command: "view", model: field("model").value, text: field("text").value };
    for (const name of ["query", "key", "select", "why", "engine", "target", "compare_text"])
      if (field(name).value.trim()) question[name] = field(name).value;
    if (field("generate").value) question.generate = Number(field("generate").value);
    if (field("chat").checked) question.chat = true;
    const [file] = field("picture").files;
    if (file) question.picture = await base64(file);
    return question;
  }

  /** @param {File} file @returns {Promise<string>} */
  function base64(file) {
    return new Promise((done, failed) => {
      const reader = new FileReader();
      reader.onload = () => done(String(reader.result).replace(/^[^,]*,/, ""));
      reader.onerror = () => failed(reader.error);
      reader.readAsDataURL(file);
    });
  }

  /** Ask, tell what is heard, show the page that ends the answer. @param {Question} question @param {string} [label] */
  async function ask(question, label = labelled(question)) {
    asking?.abort();
    const mine = (asking = new AbortController());
    const begun = performance.now();
    stop.hidden = false;
    tell("asked");
    try {
      const answer = await fetched("/ask", { method: "POST", body: JSON.stringify(question), signal: mine.signal });
      if (!answer.ok || !answer.body) throw new Error(await answer.text());
      const page = await heard(answer.body.getReader(), (line) => tell(inWords(line)));
      if (mine !== asking) return;
      add({ question, label, page, frame: framed(page) });
      tell(`${((performance.now() - begun) / 1000).toFixed(1)} s`);
    } catch (error) {
      if (mine !== asking) return;
      const gone = error instanceof TypeError ? "the server does not answer; is attnscope serve --page still running?" : "";
      tell(mine.signal.aborted ? "stopped" : gone || (error instanceof Error ? error.message : String(error)), !mine.signal.aborted);
    }
    if (mine === asking) {
      asking = null;
      stop.hidden = true;
    }
  }

  /**
   * The page of an answer. Raises Error with what the command said where it made none.
   *
   * @param {ReadableStreamDefaultReader<Uint8Array<ArrayBuffer>>} reader @param {(line: Line) => void} hear
   */
  async function heard(reader, hear) {
    let rest = new Uint8Array();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the server ended amid the answer");
      rest = joined([rest, value]);
      for (let end = rest.indexOf(10); end >= 0; end = rest.indexOf(10)) {
        /** @type {Line} */
        const line = JSON.parse(new TextDecoder().decode(rest.subarray(0, end)));
        rest = rest.slice(end + 1);
        if (typeof line.failed === "string") throw new Error(line.failed);
        if (typeof line.page === "number") return pageOf(reader, rest, line.page);
        hear(line);
      }
    }
  }

  /** @param {ReadableStreamDefaultReader<Uint8Array<ArrayBuffer>>} reader @param {Uint8Array<ArrayBuffer>} begun @param {number} size */
  async function pageOf(reader, begun, size) {
    const parts = [begun];
    let have = begun.length;
    while (have < size) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the server ended amid the answer");
      parts.push(value);
      have += value.length;
    }
    return new Blob(parts, { type: "text/html" });
  }

  /** @param {Uint8Array[]} parts @returns {Uint8Array<ArrayBuffer>} */
  function joined(parts) {
    const all = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
    let at = 0;
    for (const part of parts) {
      all.set(part, at);
      at += part.length;
    }
    return all;
  }

  /** @param {Line} line */
  function inWords({ stage, done, total, unit, said }) {
    if (typeof stage !== "string") return typeof said === "string" ? said : "";
    return typeof total === "number" && typeof done === "number" ? `${stage}: ${done} of ${total} ${unit}` : stage;
  }

  /** @param {Question} question */
  function labelled({ command, text, compare_text: other, compare_model: model, select, query, key, why }) {
    const of = command === "knockout" ? `${select} cut, ${query} → ${key}: ` : why ? `why ${why}: ` : "";
    return `${of}${text}${other ? ` | ${other}` : ""}${model ? ` | ${model}` : ""}`;
  }

  /** A frame of an origin of its own: what stands in a page cannot reach this one, its token or the server. @param {Blob} page */
  function framed(page) {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = "Answer";
    frame.src = URL.createObjectURL(page);
    frame.addEventListener("load", () => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = ({ data }) => further(frame, data);
      frame.contentWindow?.postMessage(HELLO, "*", [port2]);
    });
    return frame;
  }

  /** What was clicked in a page: whether an edge matters, why a head looks there. @param {HTMLIFrameElement} frame @param {any} data */
  function further(frame, data) {
    const entry = entries.find((one) => one.frame === frame);
    const names = ["does", "head", "query", "key"];
    if (!entry || typeof data !== "object" || !names.every((name) => typeof data?.[name] === "string")) return;
    const { does, head, query, key, side } = data;
    const { model, text, chat, compare_text: other, compare_model: second } = entry.question;
    const of = side === 1 ? { model: second ?? model, text: other ?? text } : { model, text };
    /** @type {Question} */
    const question = { command: "view", ...of, ...(chat ? { chat } : {}), query, key };
    void ask(does === "knockout" ? { ...question, command: "knockout", select: head } : { ...question, why: head });
  }

  /** @param {Entry} entry */
  function add(entry) {
    entries = [entry, ...entries];
    for (const old of entries.slice(KEPT)) drop(old);
    shown.append(entry.frame);
    show(entry);
  }

  /** @param {Entry} entry */
  function drop(entry) {
    entries = entries.filter((one) => one !== entry);
    URL.revokeObjectURL(entry.frame.src);
    entry.frame.remove();
    if (beside === entry) beside = null;
    if (current === entry && entries.length) show(entries[0]);
    else listed();
  }

  /** @param {Entry} entry */
  function show(entry) {
    current = entry;
    for (const { frame } of entries) frame.hidden = frame !== entry.frame;
    listed();
  }

  /** @param {Entry} entry */
  function compare(entry) {
    const first = beside;
    beside = first ? null : entry;
    listed();
    if (!first || first === entry) return tell(first ? "" : "choose another question to compare with");
    const [one, other] = [first.question, entry.question];
    const differing = COMPARED.filter((name) => one[name] !== other[name]);
    if (differing.length !== 1) {
      const why = differing.length ? "these differ in text and model: compare one at a time" : "these have the same text and model";
      return tell(why, true);
    }
    const beyond = ["compare_text", "compare_model", "why"]; // what a question has of another comparison
    const kept = Object.entries(one).filter(([name]) => !beyond.includes(name));
    void ask({ ...Object.fromEntries(kept), [`compare_${differing[0]}`]: other[differing[0]] });
  }

  /** @param {Entry} entry */
  function save(entry) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(entry.page);
    link.download = `attnscope-${entry.question.command}-${entries.length - entries.indexOf(entry)}.html`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  function listed() {
    list.replaceChildren(...entries.map((entry) => {
      const row = document.createElement("li");
      if (entry === current) row.setAttribute("aria-current", "true");
      const tools = document.createElement("div");
      tools.className = "tools";
      const pair = button("Compare", () => compare(entry));
      pair.setAttribute("aria-pressed", String(entry === beside));
      tools.append(button("Save", () => save(entry)), ...(entry.question.command === "view" ? [pair] : []), button("Remove", () => drop(entry)));
      const open = button(entry.label, () => show(entry));
      open.className = "asked";
      open.dir = "auto";
      row.append(open, tools);
      return row;
    }));
  }

  /** @param {string} text @param {() => void} onclick */
  function button(text, onclick) {
    const found = document.createElement("button");
    found.type = "button";
    found.textContent = text;
    found.addEventListener("click", onclick);
    return found;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    void ready.then(asked).then(ask).catch(failed);
  });
  field("text").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  for (const example of document.querySelectorAll("#empty button"))
    example.addEventListener("click", () => {
      field("text").value = example.textContent;
      form.requestSubmit();
    });
  stop.addEventListener("click", () => asking?.abort());
  field("text").focus(); // and not by `autofocus`: it does nothing where another field has the focus, and complains

  async function begin() {
    const answer = await fetched("/models");
    if (!answer.ok) throw new Error(await answer.text());
    /** @type {{models: string[]}} */
    const { models } = await answer.json();
    field("model").replaceChildren(...models.map((name) => new Option(name)));
    tell("");
  }
  /** @param {unknown} error */
  function failed(error) {
    tell(error instanceof Error ? error.message : String(error), true);
  }
  const ready = begin(); // a question that is asked before waits for it: without a model it would be refused
  ready.catch(failed);
})();
