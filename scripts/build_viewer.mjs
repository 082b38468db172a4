// Bundles attnscope/viewer/src into attnscope/viewer/bundle.js and bundle.css, the same bytes on every machine.
// The first line of each holds a hash of the sources, so that a bundle that was not rebuilt is found without Node.
//   npm ci && npm run build
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, posix } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = fileURLToPath(new URL("..", import.meta.url));
const viewer = join(root, "attnscope", "viewer");

/** The names of all source files, relative to src, sorted by code unit. */
function names(folder = "") {
  const inside = readdirSync(join(viewer, "src", folder), { withFileTypes: true });
  return inside.flatMap((entry) => {
    const name = posix.join(folder, entry.name);
    return entry.isDirectory() ? names(name) : /\.(js|css)$/.test(name) ? [name] : [];
  }).sort();
}

/** SHA-256 over name, length and text of every source and of the lock: attnscope's tests spell it again in Python. */
function sourceHash() {
  const hash = createHash("sha256");
  const files = names().map((name) => [name, join(viewer, "src", name)]);
  for (const [name, path] of [...files, ["package-lock.json", join(root, "package-lock.json")]]) {
    const text = readFileSync(path);
    hash.update(`${name} ${text.length}\n`).update(text);
  }
  return hash.digest("hex");
}

/** The licence of every package that is in a bundle, as comments: they ask to travel with it. */
function licences(metafile) {
  const packages = Object.keys(metafile.inputs).map((path) => /^node_modules\/((@[^/]+\/)?[^/]+)\//.exec(path)?.[1]);
  return [...new Set(packages.filter(Boolean))].sort().map((name) => {
    const text = readFileSync(join(root, "node_modules", name, "LICENSE"), "utf8").trim();
    return `/* ${name}\n${text.replaceAll("*/", "* /")} */`;
  });
}

const banner = `/* attnscope viewer, made by scripts/build_viewer.mjs of sources ${sourceHash()} */`;
for (const [entry, name] of [["main.js", "bundle.js"], ["style.css", "bundle.css"]]) {
  const made = await build({
    absWorkingDir: root,
    entryPoints: [join("attnscope", "viewer", "src", entry)],
    bundle: true,
    minify: true,
    format: "iife",
    target: ["chrome110", "firefox115", "safari16.4"],  // the first with DecompressionStream("deflate-raw") in all
    charset: "ascii",
    legalComments: "none",
    metafile: true,
    write: false,
    logLevel: "warning",
  });
  const text = [banner, ...licences(made.metafile), made.outputFiles[0].text].join("\n");
  writeFileSync(join(process.argv[2] ?? viewer, name), text);
}
