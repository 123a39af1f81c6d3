// Prints the schemas that TypeBox writes. Run in a folder with `npm install typebox@1`: node typebox.mjs > typebox.json
import { readFileSync } from "node:fs";
import { Type } from "typebox";

const named = Type.Object({ name: Type.String() });
const aged = Type.Object({ age: Type.Integer() });
const box = (inner) => Type.Object({ content: inner });
const Tree = Type.Cyclic({ Tree: Type.Object({ value: Type.Integer(), children: Type.Array(Type.Ref("Tree")) }) }, "Tree");
const Person = Type.Cyclic(
  {
    Person: Type.Object({ name: Type.String(), pets: Type.Array(Type.Ref("Pet")) }),
    Pet: Type.Object({ name: Type.String(), owner: Type.Optional(Type.Ref("Person")) }),
  },
  "Person",
);
const Point = Type.Object({ x: Type.Number(), y: Type.Number() }, { $id: "Point" });

const types = {
  string: Type.String(),
  "string length": Type.String({ minLength: 2, maxLength: 10 }),
  "string pattern": Type.String({ pattern: "^[A-Z]{2}\\d{3}$" }),
  "string prefix": Type.TemplateLiteral("https://${string}"),
  email: Type.String({ format: "email" }),
  uuid: Type.String({ format: "uuid" }),
  uri: Type.String({ format: "uri" }),
  date: Type.String({ format: "date" }),
  time: Type.String({ format: "time" }),
  "date-time": Type.String({ format: "date-time" }),
  duration: Type.String({ format: "duration" }),
  ipv4: Type.String({ format: "ipv4" }),
  ipv6: Type.String({ format: "ipv6" }),
  hostname: Type.String({ format: "hostname" }),
  bytes: Type.String({ contentEncoding: "base64" }),
  identifier: Type.TemplateLiteral("${'user' | 'team'}-${number}"),
  integer: Type.Integer(),
  "integer range": Type.Integer({ minimum: 0, maximum: 130 }),
  long: Type.BigInt(),
  number: Type.Number(),
  "number range": Type.Number({ exclusiveMinimum: 0, maximum: 1 }),
  multiple: Type.Integer({ multipleOf: 5 }),
  decimal: Type.Number({ multipleOf: 0.01 }),
  boolean: Type.Boolean(),
  nullable: Type.Union([Type.String(), Type.Null()]),
  optional: Type.Optional(Type.String()),
  default: Type.Integer({ default: 3 }),
  constant: Type.Literal("cat"),
  "enum of strings": Type.Union([Type.Literal("red"), Type.Literal("green"), Type.Literal("blue")]),
  "enum of numbers": Type.Enum([1, 2, 3]),
  array: Type.Array(Type.String()),
  "array bounds": Type.Array(Type.Integer(), { minItems: 1, maxItems: 3 }),
  set: Type.Array(Type.String(), { uniqueItems: true }),
  "set of an enum": Type.Array(Type.Enum(["red", "green", "blue"]), { uniqueItems: true }),
  tuple: Type.Tuple([Type.String(), Type.Integer()]),
  "tuple and rest": null, // Type.Rest is no JSON Schema until a mapped type resolves it
  map: Type.Record(Type.String(), Type.Integer()),
  "map by keys": Type.Record(Type.Union([Type.Literal("a"), Type.Literal("b")]), Type.Integer()),
  "map by pattern": Type.Record(Type.TemplateLiteral("x-${number}"), Type.Integer()),
  "closed object": Type.Object({ a: Type.Integer() }, { additionalProperties: false }),
  "open object": Type.Object({ a: Type.Integer() }, { additionalProperties: Type.Unknown() }),
  union: Type.Union([Type.Integer(), Type.String(), Type.Array(Type.Boolean())]),
  "discriminated union": Type.Union([
    Type.Object({ kind: Type.Literal("cat"), lives: Type.Integer() }),
    Type.Object({ kind: Type.Literal("dog"), name: Type.String() }),
  ]),
  intersection: Type.Intersect([named, aged], { unevaluatedProperties: false }),
  recursive: Tree,
  "mutually recursive": Person,
  generic: Type.Object({ a: box(Type.Integer()), b: box(Type.String()) }),
  shared: Type.Object({ from: Point, to: Type.Object({ ...Point.properties }, { description: "the end" }) }),
  any: Type.Any(),
};

const version = JSON.parse(readFileSync(new URL("node_modules/typebox/package.json", `file://${process.cwd()}/`))).version;
const found = {};
for (const [name, type] of Object.entries(types)) found[name] = type && JSON.parse(JSON.stringify(Type.Object({ v: type })));
console.log(JSON.stringify({ generator: `TypeBox ${version}`, types: found }));
