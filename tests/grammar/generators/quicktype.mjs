// Prints the schemas that quicktype infers from samples, and of a schema where samples show nothing of the type. Run in a folder with `npm install quicktype-core@26`:
// node quicktype.mjs > quicktype.json
import { readFileSync } from "node:fs";
import { FetchingJSONSchemaStore, InputData, JSONSchemaInput, jsonInputForTargetLanguage, quicktype } from "quicktype-core";

// Samples of each type, or a schema; null: neither shows it to quicktype.
const samples = {
  string: ["some words", "other words"],
  "string length": { type: "string", minLength: 2, maxLength: 10 },
  "string pattern": { type: "string", pattern: "^[A-Z]{2}\\d{3}$" },
  "string prefix": { type: "string", pattern: "^https://" },
  email: ["a@example.org", "b@example.org"],
  uuid: ["123e4567-e89b-12d3-a456-426614174000", "a3bb189e-8bf9-4c9a-9c1a-0d5cf5a1d1aa"],
  uri: ["https://example.org/a.png", "https://example.org/b.png"],
  date: ["2024-02-29", "2025-01-31"],
  time: ["12:30:00Z", "08:15:30Z"],
  "date-time": ["2024-02-29T12:30:00Z", "2025-01-31T08:15:30+01:00"],
  duration: ["P1D", "PT5M"],
  ipv4: ["192.168.0.1", "10.0.0.1"],
  ipv6: ["2001:db8::1", "::1"],
  hostname: ["a.example.org", "b.example.org"],
  bytes: ["AAEC", "AwQF"],
  identifier: ["12345", "67890"],
  integer: [1, 20],
  "integer range": { type: "integer", minimum: 0, maximum: 130 },
  long: [9007199254740993, 1],
  number: [1.5, 2.25],
  "number range": { type: "number", minimum: 0, maximum: 1 },
  multiple: null,
  decimal: [0.01, 12.5],
  boolean: [true, false],
  nullable: ["some words", null],
  optional: ["some words", undefined],
  default: { type: "integer", default: 3 },
  constant: { const: "cat" },
  "enum of strings": ["red", "green", "blue", "red", "green", "blue", "red", "green", "blue", "red", "green", "blue"],
  "enum of numbers": [1, 2, 3, 1, 2, 3],
  array: [["some words"], ["other words", "more"]],
  "array bounds": { type: "array", items: { type: "integer" }, minItems: 1, maxItems: 3 },
  set: { type: "array", items: { type: "string" }, uniqueItems: true },
  "set of an enum": { type: "array", items: { enum: ["red", "green", "blue"] }, uniqueItems: true },
  tuple: [["some words", 3], ["other words", 4]],
  "tuple and rest": null,
  map: [Object.fromEntries([..."abcdefghijklmnopqrstuvwxyz"].map((c, at) => [`${c}${at}`, at])), { z9: 1 }],
  "map by keys": [{ a: 1, b: 2 }, { b: 3 }],
  "map by pattern": null,
  "closed object": [{ a: 1 }, { a: 2 }],
  "open object": { type: "object", properties: { a: { type: "integer" } }, required: ["a"], additionalProperties: true },
  union: [1, "some words", [true]],
  "discriminated union": [{ kind: "cat", lives: 9 }, { kind: "dog", name: "Rex" }],
  intersection: [{ name: "Ada", age: 36 }],
  recursive: [{ value: 1, children: [{ value: 2, children: [{ value: 3, children: [] }] }] }],
  "mutually recursive": [{ name: "Ada", pets: [{ name: "Rex", owner: { name: "Bob", pets: [{ name: "Tom" }] } }] }],
  generic: [{ a: { content: 1 }, b: { content: "some words" } }],
  shared: [{ from: { x: 1.5, y: 2 }, to: { x: 3, y: 4.5 } }],
  any: [null, null],
};

async function schemaOf(of) {
  const input = Array.isArray(of) ? jsonInputForTargetLanguage("schema") : new JSONSchemaInput(new FetchingJSONSchemaStore());
  if (Array.isArray(of)) {
    await input.addSource({ name: "Root", samples: of.map((v) => JSON.stringify({ v })) });
  } else {
    const schema = { type: "object", properties: { v: of }, required: ["v"], additionalProperties: false };
    await input.addSource({ name: "Root", schema: JSON.stringify(schema) });
  }
  const data = new InputData();
  data.addInput(input);
  return JSON.parse((await quicktype({ inputData: data, lang: "schema" })).lines.join("\n"));
}

const version = JSON.parse(readFileSync("node_modules/quicktype-core/package.json")).version;
const types = {};
for (const [name, of] of Object.entries(samples)) types[name] = of && (await schemaOf(of));
console.log(JSON.stringify({ generator: `quicktype ${version}`, types }));
