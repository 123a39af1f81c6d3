// Prints the schemas that ts-json-schema-generator writes of types.ts beside it. Run in a folder with both files and
// `npm install ts-json-schema-generator@2`: node ts-json-schema-generator.mjs > ts-json-schema-generator.json
import { readFileSync, writeFileSync } from "node:fs";
import { createGenerator } from "ts-json-schema-generator";

const source = readFileSync("types.ts", "utf8");
const names = [...source.slice(source.indexOf("interface Types")).matchAll(/^ {2}(?:"([^"]+)"|(\w+)): /gm)].map((m) => m[1] ?? m[2]);
writeFileSync("roots.ts", `${source}\n${names.map((name, at) => root(name, at)).join("\n")}\n`);

function root(name, at) {
  // The comment above a property says more than its type does, so the property moves with it.
  const found = source.match(new RegExp(`((?: {2}/\\*\\*(?:(?!\\*/)[^])*\\*/\\n)?) {2}(?:"${name}"|${name})(: [^]*?;)\\n(?: {2}\\S|\\})`));
  return `export interface Root${at} {\n${found[1]}  v${found[2]}\n}`;
}
const version = JSON.parse(readFileSync("node_modules/ts-json-schema-generator/package.json")).version;
const types = {};
names.forEach((name, at) => {
  try {
    types[name] = createGenerator({ path: "roots.ts", type: `Root${at}`, skipTypeCheck: true }).createSchema(`Root${at}`);
  } catch (error) {
    types[name] = null;
    console.error(name, String(error).slice(0, 200));
  }
});
console.log(JSON.stringify({ generator: `ts-json-schema-generator ${version}`, types }));
