// Prints the schemas that zod 4 writes. Run in a folder with `npm install zod@4`: node zod.mjs > zod.json
import { readFileSync } from "node:fs";
import { z } from "zod";

const Tree = z.object({ value: z.int(), get children() { return z.array(Tree); } });
const Person = z.object({ name: z.string(), get pets() { return z.array(Pet); } });
const Pet = z.object({ name: z.string(), get owner() { return Person.optional(); } });
const Point = z.object({ x: z.number(), y: z.number() }).meta({ id: "Point" });
const box = (inner) => z.object({ content: inner });
const named = z.object({ name: z.string() });

const types = {
  string: z.string(),
  "string length": z.string().min(2).max(10),
  "string pattern": z.string().regex(/^[A-Z]{2}\d{3}$/),
  "string prefix": z.string().startsWith("https://"),
  email: z.email(),
  uuid: z.uuid(),
  uri: z.url(),
  date: z.iso.date(),
  time: z.iso.time(),
  "date-time": z.iso.datetime({ offset: true }),
  duration: z.iso.duration(),
  ipv4: z.ipv4(),
  ipv6: z.ipv6(),
  hostname: z.hostname(),
  bytes: z.base64(),
  identifier: z.cuid2(),
  integer: z.int(),
  "integer range": z.int().min(0).max(130),
  long: null, // z.int64() is a bigint, which cannot be represented in JSON Schema
  number: z.number(),
  "number range": z.number().gt(0).lte(1),
  multiple: z.int().multipleOf(5),
  decimal: z.number().multipleOf(0.01),
  boolean: z.boolean(),
  nullable: z.string().nullable(),
  optional: z.string().optional(),
  default: z.int().default(3),
  constant: z.literal("cat"),
  "enum of strings": z.enum(["red", "green", "blue"]),
  "enum of numbers": z.literal([1, 2, 3]),
  array: z.array(z.string()),
  "array bounds": z.array(z.int()).min(1).max(3),
  set: null, // z.set cannot be represented in JSON Schema
  "set of an enum": null,
  tuple: z.tuple([z.string(), z.int()]),
  "tuple and rest": z.tuple([z.string()], z.int()),
  map: z.record(z.string(), z.int()),
  "map by keys": z.record(z.enum(["a", "b"]), z.int()),
  "map by pattern": z.record(z.string().regex(/^[a-z]{1,8}$/), z.int()),
  "closed object": z.strictObject({ a: z.int() }),
  "open object": z.looseObject({ a: z.int() }),
  union: z.union([z.int(), z.string(), z.array(z.boolean())]),
  "discriminated union": z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("cat"), lives: z.int() }),
    z.object({ kind: z.literal("dog"), name: z.string() }),
  ]),
  intersection: z.intersection(named, z.object({ age: z.int() })),
  recursive: Tree,
  "mutually recursive": Person,
  generic: z.object({ a: box(z.int()), b: box(z.string()) }),
  shared: z.object({ from: Point, to: Point.describe("the end") }),
  any: z.any(),
};


const version = JSON.parse(readFileSync(new URL("node_modules/zod/package.json", `file://${process.cwd()}/`))).version;
const found = {};
for (const [name, type] of Object.entries(types)) found[name] = type && z.toJSONSchema(z.object({ v: type }));
console.log(JSON.stringify({ generator: `zod ${version}`, types: found }));
