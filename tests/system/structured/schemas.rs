//! Schemas by chance, the same every time, and schemas that mean harm.

use serde_json::{Map, Value, json};

/// Numbers by chance.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u32) -> Self {
        Self(u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// A number below `below`.
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ bits >> 31) % below
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

/// A schema whose answers are bounded in length.
pub fn schema(draw: &mut Draw) -> Value {
    let mut schema = object(draw, 3);
    schema["$defs"] = json!({"point": object(draw, 0), "word": text(draw), "count": number(draw)});
    schema
}

fn value(draw: &mut Draw, depth: u32) -> Value {
    match draw.below(if depth == 0 { 7 } else { 11 }) {
        0 | 1 => number(draw),
        2 | 3 => text(draw),
        4 => json!({"type": draw.one(&["boolean", "null"])}),
        5 => draw
            .one(&[json!({"enum": ["low", "high", 3, null]}), json!({"const": "v1.0"}), json!({"enum": [1, 22, 333]})])
            .clone(),
        6 => json!({"type": "string", "enum": ["π", "naïve", "tab\there", "quote\"", "日本"]}),
        7 => array(draw, depth - 1),
        8 => object(draw, depth - 1),
        9 => json!({"$ref": draw.one(&["#/$defs/point", "#/$defs/word", "#/$defs/count"])}),
        _ => json!({"anyOf": [value(draw, depth - 1), value(draw, depth - 1)]}),
    }
}

fn number(draw: &mut Draw) -> Value {
    let low = draw.below(2000) as i64 - 1000;
    let high = low + draw.below(5000) as i64;
    match draw.below(5) {
        0 => json!({"type": "integer", "minimum": low, "maximum": high}),
        1 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}),
        2 => json!({"type": "integer", "minimum": 100_000, "maximum": 99_999_999}),
        3 => json!({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100_000}),
        // Without an end to its digits: bounded by a pattern of the text instead.
        _ => json!({"type": "string", "pattern": "^-?[0-9]{1,4}\\.[0-9]{2}$"}),
    }
}

fn text(draw: &mut Draw) -> Value {
    let least = draw.below(6);
    match draw.below(5) {
        0 => json!({"type": "string", "minLength": least, "maxLength": least + draw.below(20)}),
        1 => json!({"type": "string", "pattern": "^[A-Z][a-z]{2,9}( [A-Z][a-z]{1,7}){0,2}$"}),
        2 => json!({"type": "string", "pattern": "^(id|key)-[0-9a-f]{8}$"}),
        3 => json!({"type": "string", "format": draw.one(&["date", "uuid", "ipv4"])}),
        _ => json!({"type": "string", "minLength": 8, "maxLength": 30}),
    }
}

fn array(draw: &mut Draw, depth: u32) -> Value {
    let least = draw.below(3);
    json!({"type": "array", "items": value(draw, depth), "minItems": least, "maxItems": least + draw.below(3)})
}

fn object(draw: &mut Draw, depth: u32) -> Value {
    let names = ["id", "name", "total", "tags", "a b", "naïve", "quote\"d", "x"];
    let mut properties = Map::new();
    for _ in 0..=draw.below(3) {
        properties.insert((*draw.one(&names)).to_owned(), value(draw, depth));
    }
    let required: Vec<&String> = properties.keys().filter(|_| draw.below(3) > 0).collect();
    json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false})
}

/// Name, field, value, and whether it is a form all the same.
pub fn hostile() -> Vec<(&'static str, &'static str, Value, bool)> {
    let schema = |name, schema: Value, compiles| (name, "json_schema", schema, compiles);
    let regex = |name, regex: String, compiles| (name, "regex", Value::from(regex), compiles);
    let grammar = |name, grammar: String, compiles| (name, "grammar", Value::from(grammar), compiles);
    let mut deep = json!({"type": "integer"});
    for _ in 0..40 {
        deep = json!({"type": "array", "items": {"anyOf": [deep]}});
    }
    let circle = json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"});
    let endless =
        json!({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"});
    let items = json!({"type": "array", "minItems": 10_000_000, "items": {"type": "string"}});
    vec![
        schema("not JSON", json!("{"), false),
        schema("a type that is a number", json!({"type": 5}), false),
        schema("an unknown type", json!({"type": "colour"}), false),
        schema("a reference to nothing", json!({"$ref": "#/$defs/none"}), false),
        schema("a reference elsewhere", json!({"$ref": "https://example.com/schema.json"}), false),
        schema("a reference to itself", json!({"$ref": "#"}), false),
        schema("a circle of references", circle, false),
        schema("bounds that cross", json!({"type": "integer", "minimum": 5, "maximum": 4}), false),
        schema("nothing in common", json!({"allOf": [{"type": "string"}, {"type": "integer"}]}), false),
        schema("too deep", deep, false),
        schema("a keyword that is not built", json!({"type": "array", "uniqueItems": true}), false),
        schema("options of the library", json!({"type": "string", "x-guidance": {"lenient": true}}), false),
        schema("a pattern that is none", json!({"type": "string", "pattern": "(a"}), false),
        schema("no end", endless, true),
        schema("ten million items", items, true),
        schema("a long string", json!({"type": "string", "minLength": 100_000_000}), true),
        regex("a look-behind", "(?<=a)b".into(), false),
        regex("an open group", "(a".into(), false),
        regex("deep groups", format!("{}a{}", "(".repeat(30_000), ")".repeat(30_000)), false),
        regex("too long", "a".repeat(300_000), false),
        regex("a huge repetition", "((a{1,1000}){1,1000}){1,1000}".into(), true),
        regex("repetitions of repetitions", "((((((a*)*)*)*)*)*)*b".into(), true),
        regex("many ways", "(a|aa|aaa)*(a|aa)*(a|b|ab)*x{0,200}".into(), true),
        regex("a needle behind anything", "(.*)(a|b)(.{400})".into(), true),
        grammar("deep rules", format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000)), false),
        grammar("no rule", "hello".into(), false),
        grammar("an unknown rule", "start: nobody".into(), false),
        grammar("another notation", "root ::= \"a\"".into(), false),
        grammar("a special token", "start: <|im_end|>".into(), false),
        grammar("a token by number", "start: <[2046]>".into(), false),
        grammar("only the empty text", "start: \"\"".into(), false),
        grammar("a rule that ends nowhere", "start: \"a\" start".into(), true),
    ]
}
