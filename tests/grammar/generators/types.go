// Prints the schemas that invopop/jsonschema writes: go run types.go > invopop.json, in a module that requires
// github.com/invopop/jsonschema v0.13.0.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/invopop/jsonschema"
)

type String struct{ V string `json:"v"` }
type StringLength struct{ V string `json:"v" jsonschema:"minLength=2,maxLength=10"` }
type StringPattern struct{ V string `json:"v" jsonschema:"pattern=^[A-Z]{2}\\d{3}$"` }
type StringPrefix struct{ V string `json:"v" jsonschema:"pattern=^https://"` }
type Email struct{ V string `json:"v" jsonschema:"format=email"` }
type UUID struct{ V string `json:"v" jsonschema:"format=uuid"` }
type URI struct{ V url.URL `json:"v"` }
type Date struct{ V string `json:"v" jsonschema:"format=date"` }
type Time struct{ V string `json:"v" jsonschema:"format=time"` }
type DateTime struct{ V time.Time `json:"v"` }
type Duration struct{ V string `json:"v" jsonschema:"format=duration"` }
type IPv4 struct{ V net.IP `json:"v"` }
type IPv6 struct{ V string `json:"v" jsonschema:"format=ipv6"` }
type Hostname struct{ V string `json:"v" jsonschema:"format=hostname"` }
type Bytes struct{ V []byte `json:"v"` }
type Identifier struct{ V string `json:"v" jsonschema:"pattern=^[a-z][a-z0-9]{5\\,23}$,minLength=6,maxLength=24"` }
type Integer struct{ V int `json:"v"` }
type IntegerRange struct{ V int `json:"v" jsonschema:"minimum=0,maximum=130"` }
type Long struct{ V int64 `json:"v"` }
type Number struct{ V float64 `json:"v"` }
type NumberRange struct{ V float64 `json:"v" jsonschema:"exclusiveMinimum=0,maximum=1"` }
type Multiple struct{ V int `json:"v" jsonschema:"multipleOf=5"` }
type Decimal struct{ V float64 `json:"v" jsonschema:"multipleOf=0.01"` }
type Boolean struct{ V bool `json:"v"` }
type Nullable struct{ V *string `json:"v" jsonschema:"nullable"` }
type Optional struct{ V *string `json:"v,omitempty"` }
type Default struct{ V int `json:"v" jsonschema:"default=3"` }
type Constant struct{ V string `json:"v" jsonschema:"enum=cat"` }
type EnumStrings struct{ V string `json:"v" jsonschema:"enum=red,enum=green,enum=blue"` }
type EnumNumbers struct{ V int `json:"v" jsonschema:"enum=1,enum=2,enum=3"` }
type Array struct{ V []string `json:"v"` }
type ArrayBounds struct{ V []int `json:"v" jsonschema:"minItems=1,maxItems=3"` }
type Set struct{ V []string `json:"v" jsonschema:"uniqueItems=true"` }
type SetOfEnum struct{ V []string `json:"v" jsonschema:"uniqueItems=true,enum=red,enum=green,enum=blue"` }
type Fixed struct{ V [3]int `json:"v"` }
type Map struct{ V map[string]int `json:"v"` }
type MapOfInts struct{ V map[int]int `json:"v"` }
type Closed struct{ V struct{ A int `json:"a"` } `json:"v"` }
type Open struct{ V map[string]any `json:"v"` }
type Union struct{ V any `json:"v" jsonschema:"oneof_type=integer;string;array"` }
type Discriminated struct{ V Animal `json:"v"` }
type Animal struct{}
type Cat struct{ Kind string `json:"kind" jsonschema:"enum=cat"`; Lives int `json:"lives"` }
type Dog struct{ Kind string `json:"kind" jsonschema:"enum=dog"`; Name string `json:"name"` }

func (Animal) JSONSchema() *jsonschema.Schema {
	r := jsonschema.Reflector{DoNotReference: true, Anonymous: true}
	cat, dog := r.Reflect(Cat{}), r.Reflect(Dog{})
	cat.Version, dog.Version = "", ""
	return &jsonschema.Schema{OneOf: []*jsonschema.Schema{cat, dog}}
}

type Named struct{ Name string `json:"name"` }
type Aged struct{ Named; Age int `json:"age"` }
type Intersection struct{ V Aged `json:"v"` }
type Tree struct{ Value int `json:"value"`; Children []Tree `json:"children"` }
type Recursive struct{ V Tree `json:"v"` }
type Person struct{ Name string `json:"name"`; Pets []Pet `json:"pets"` }
type Pet struct{ Name string `json:"name"`; Owner *Person `json:"owner,omitempty"` }
type Mutual struct{ V Person `json:"v"` }
type Box[T any] struct{ Content T `json:"content"` }
type Boxes struct{ A Box[int] `json:"a"`; B Box[string] `json:"b"` }
type Generic struct{ V Boxes `json:"v"` }
type Point struct{ X float64 `json:"x"`; Y float64 `json:"y"` }
type Line struct{ From Point `json:"from"`; To Point `json:"to" jsonschema:"description=the end"` }
type Shared struct{ V Line `json:"v"` }
type Any struct{ V any `json:"v"` }

func main() {
	// nil: Go or the library has no such type.
	all := map[string]any{
		"string": String{}, "string length": StringLength{}, "string pattern": StringPattern{}, "string prefix": StringPrefix{},
		"email": Email{}, "uuid": UUID{}, "uri": URI{}, "date": Date{}, "time": Time{}, "date-time": DateTime{},
		"duration": Duration{}, "ipv4": IPv4{}, "ipv6": IPv6{}, "hostname": Hostname{}, "bytes": Bytes{},
		"identifier": Identifier{}, "integer": Integer{}, "integer range": IntegerRange{}, "long": Long{}, "number": Number{},
		"number range": NumberRange{}, "multiple": Multiple{}, "decimal": Decimal{}, "boolean": Boolean{},
		"nullable": Nullable{}, "optional": Optional{}, "default": Default{}, "constant": Constant{},
		"enum of strings": EnumStrings{}, "enum of numbers": EnumNumbers{}, "array": Array{}, "array bounds": ArrayBounds{},
		"set": Set{}, "set of an enum": SetOfEnum{}, "tuple": Fixed{}, "tuple and rest": nil, "map": Map{},
		"map by keys": nil, "map by pattern": MapOfInts{}, "closed object": Closed{}, "open object": Open{},
		"union": Union{}, "discriminated union": Discriminated{}, "intersection": Intersection{}, "recursive": Recursive{},
		"mutually recursive": Mutual{}, "generic": Generic{}, "shared": Shared{}, "any": Any{},
	}
	types := map[string]*jsonschema.Schema{}
	for name, of := range all {
		if types[name] = nil; of != nil {
			types[name] = jsonschema.Reflect(of)
		}
	}
	written, _ := json.Marshal(map[string]any{"generator": "invopop/jsonschema 0.13.0", "types": types})
	fmt.Println(string(written))
}
