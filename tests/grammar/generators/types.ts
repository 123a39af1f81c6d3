// The types whose schemas ts-json-schema-generator writes; ts-json-schema-generator.mjs runs it over each of them.
type Color = "red" | "green" | "blue";
interface Tree { value: number; children: Tree[] }
interface Person { name: string; pets: Pet[] }
interface Pet { name: string; owner?: Person }
interface Named { name: string }
interface Aged extends Named { age: number }
interface Box<T> { content: T }
export interface Boxes { a: Box<number>; b: Box<string> }
interface Point { x: number; y: number }
interface Cat { kind: "cat"; lives: number }
interface Dog { kind: "dog"; name: string }
/** @discriminator kind */
type Animal = Cat | Dog;
enum Level { low = 1, mid = 2, high = 3 }
export interface Types {
  string: string;
  /** @minLength 2
   * @maxLength 10 */
  "string length": string;
  /** @pattern ^[A-Z]{2}\d{3}$ */
  "string pattern": string;
  "string prefix": `https://${string}`;
  /** @format email */
  email: string;
  /** @format uuid */
  uuid: string;
  uri: URL;
  /** @format date */
  date: string;
  /** @format time */
  time: string;
  "date-time": Date;
  /** @format duration */
  duration: string;
  /** @format ipv4 */
  ipv4: string;
  /** @format ipv6 */
  ipv6: string;
  /** @format hostname */
  hostname: string;
  /** @contentEncoding base64 */
  bytes: string;
  identifier: `user-${number}`;
  /** @asType integer */
  integer: number;
  /** @asType integer
   * @minimum 0
   * @maximum 130 */
  "integer range": number;
  long: bigint;
  number: number;
  /** @exclusiveMinimum 0
   * @maximum 1 */
  "number range": number;
  /** @asType integer
   * @multipleOf 5 */
  multiple: number;
  /** @multipleOf 0.01 */
  decimal: number;
  boolean: boolean;
  nullable: string | null;
  optional: { s?: string };
  /** @default 3 */
  default: number;
  constant: "cat";
  "enum of strings": Color;
  "enum of numbers": Level;
  array: string[];
  /** @minItems 1
   * @maxItems 3 */
  "array bounds": number[];
  set: Set<string>;
  /** @uniqueItems true */
  "set of an enum": Color[];
  tuple: [string, number];
  "tuple and rest": [string, ...number[]];
  map: Record<string, number>;
  "map by keys": Partial<Record<Color, number>>;
  "map by pattern": { [key: `x-${string}`]: number };
  "closed object": { a: number };
  "open object": { a: number; [other: string]: unknown };
  union: number | string | boolean[];
  "discriminated union": Animal;
  intersection: Aged & { tall: boolean };
  recursive: Tree;
  "mutually recursive": Person;
  generic: { a: Box<number>; b: Box<string>; c: Partial<Boxes> };
  shared: { from: Point;
    /** the end */
    to: Point };
  any: any;
}
