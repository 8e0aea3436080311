//! Settings of a route, varied.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Values for one setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// Dots lead into tables.
    pub setting: String,
    pub values: Vec<Value>,
}

impl Sweep {
    /// Read `NAME=V1,V2,…` or `NAME=[V1, V2, …]`. Values are TOML; in the first form, a value that is not
    /// is a string.
    pub fn parse(text: &str) -> Result<Self, String> {
        let fault = |message: &str| format!("{text:?} {message}; write NAME=V1,V2 or NAME=[V1, V2]");
        let (setting, values) = text.split_once('=').ok_or_else(|| fault("has no `=`"))?;
        let (setting, values) = (setting.trim(), values.trim());
        if setting.split('.').any(str::is_empty) {
            return Err(fault("names no setting"));
        }
        let values = if values.starts_with('[') {
            match toml_value(values).map_err(|e| fault(&format!("is not a TOML array: {e}")))? {
                Value::Array(values) => values,
                _ => return Err(fault("is not a TOML array")),
            }
        } else if values.contains(['{', '[']) {
            return Err(fault("has tables or arrays as values, which must be in brackets"));
        } else {
            values.split(',').map(str::trim).map(|v| toml_value(v).unwrap_or_else(|_| v.into())).collect()
        };
        if values.is_empty() || values.iter().any(|value| value.as_str() == Some("")) {
            return Err(fault("has an empty value"));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = values.iter().find(|value| !seen.insert(shown(value))) {
            return Err(fault(&format!("has {} twice", shown(twice))));
        }
        Ok(Self { setting: setting.into(), values })
    }
}

/// `settings` with each combination of the sweeps' values, the last sweep changing fastest. Each comes
/// with what was set, such as `threshold=0.03`, which no other has; without sweeps that is empty.
pub fn combinations(settings: &Value, sweeps: &[Sweep]) -> Result<Vec<(String, Value)>, String> {
    let mut points = vec![(String::new(), settings.clone())];
    for sweep in sweeps {
        let mut next = Vec::with_capacity(points.len() * sweep.values.len());
        for (label, settings) in &points {
            for value in &sweep.values {
                let mut settings = settings.clone();
                set(&mut settings, &sweep.setting, value.clone())?;
                let comma = if label.is_empty() { "" } else { "," };
                next.push((format!("{label}{comma}{}={}", sweep.setting, shown(value)), settings));
            }
        }
        points = next;
    }
    let mut seen = HashSet::new();
    match points.iter().find(|(label, _)| !seen.insert(label)) {
        Some((label, _)) => Err(format!("two points would be called `{label}`; give other values")),
        None => Ok(points),
    }
}

/// Put `value` at `setting`, making the tables on the way that are missing.
pub fn set(settings: &mut Value, setting: &str, value: Value) -> Result<(), String> {
    let mut at = settings;
    for key in setting.split('.') {
        let known = shown(at);
        let Value::Object(table) = at else {
            return Err(format!("setting `{setting}`: `{key}` cannot be set in {known}, which is not a table"));
        };
        at = table.entry(key).or_insert_with(|| Value::Object(Map::new()));
    }
    *at = value;
    Ok(())
}

/// What a schema says of a numeric setting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounds {
    pub minimum: Option<f64>,
    pub maximum: Option<f64>,
    /// Whole numbers only.
    pub integer: bool,
}

/// The bounds that the JSON Schema of the settings sets to `setting`, as far as it does.
pub fn bounds(schema: &str, setting: &str) -> Bounds {
    let Ok(schema) = serde_json::from_str::<Value>(schema) else { return Bounds::default() };
    let mut at = &schema;
    for key in setting.split('.') {
        let property = at.get("properties").and_then(|properties| properties.get(key));
        let Some(found) = property.or_else(|| at.get("additionalProperties")) else { return Bounds::default() };
        at = found;
    }
    let number = |name: &str| at.get(name).and_then(Value::as_f64);
    let integer = at.get("type").and_then(Value::as_str) == Some("integer");
    Bounds { minimum: number("minimum"), maximum: number("maximum"), integer }
}

/// A value in the short form of labels.
pub fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(",")),
        Value::Object(entries) => {
            let entries: Vec<_> = entries.iter().map(|(key, value)| format!("{key}={}", shown(value))).collect();
            format!("{{{}}}", entries.join(","))
        }
        other => other.to_string(),
    }
}

/// `settings` of `route` as lines of a configuration file.
pub fn config_lines(route: &str, settings: &Value) -> Result<String, String> {
    toml::to_string(&serde_json::json!({"routes": {route: {"settings": settings}}})).map_err(|e| e.to_string())
}

fn toml_value(text: &str) -> Result<Value, String> {
    let table: toml::Table = toml::from_str(&format!("value = {text}")).map_err(|e| e.message().to_owned())?;
    match (table.len(), table.into_iter().next()) {
        (1, Some((_, value))) => json(value),
        _ => Err("more than one value".into()),
    }
}

fn json(value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(integer) => integer.into(),
        toml::Value::Float(float) if float.is_finite() => float.into(),
        toml::Value::Float(float) => return Err(format!("{float} is not a finite number")),
        toml::Value::Boolean(boolean) => boolean.into(),
        toml::Value::Datetime(_) => return Err("dates are not supported in settings; write a string".into()),
        toml::Value::Array(items) => Value::Array(items.into_iter().map(json).collect::<Result<_, _>>()?),
        toml::Value::Table(entries) => {
            let entries = entries.into_iter().map(|(key, value)| Ok((key, json(value)?)));
            Value::Object(entries.collect::<Result<_, String>>()?)
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn values(text: &str) -> Vec<Value> {
        Sweep::parse(text).unwrap().values
    }

    #[test]
    fn lists_and_arrays() {
        assert_eq!(
            Sweep::parse("threshold=0.03, 1").unwrap(),
            Sweep { setting: "threshold".into(), values: vec![json!(0.03), json!(1)] }
        );
        assert_eq!(values("mode=fast,\"0.5\",true"), [json!("fast"), json!("0.5"), json!(true)]);
        assert_eq!(
            values("weights=[{small=0.5, large=0.5}, { small = 0.9, large = 0.1 }]"),
            [json!({"small": 0.5, "large": 0.5}), json!({"small": 0.9, "large": 0.1})]
        );
        assert_eq!(values("draws=[[0.1, 0.2], [0.3]]"), [json!([0.1, 0.2]), json!([0.3])]);
    }

    #[test]
    fn what_cannot_be_read() {
        for (text, message) in [
            ("threshold", "has no `=`"),
            ("=1", "names no setting"),
            ("a..b=1", "names no setting"),
            ("a=", "has an empty value"),
            ("a=1,,2", "has an empty value"),
            ("a=[]", "has an empty value"),
            ("a={x=1},{x=2}", "must be in brackets"),
            ("a=[1, nan]", "NaN is not a finite number"),
            ("a=[1\n]\nb=[2]", "more than one value"),
            ("a=[1", "is not a TOML array"),
            ("a=0.1,0.10", "has 0.1 twice"),
        ] {
            let error = Sweep::parse(text).unwrap_err();
            assert!(error.contains(message) && error.contains("write NAME=V1,V2"), "{text}: {error}");
        }
    }

    #[test]
    fn combinations_of_values() {
        let base = json!({"threshold": 1, "weights": {"a": 0.1}});
        assert_eq!(combinations(&base, &[]).unwrap(), [(String::new(), base.clone())]);
        let sweeps = [Sweep::parse("weights.b=1,2").unwrap(), Sweep::parse("threshold=3,4").unwrap()];
        let points = combinations(&base, &sweeps).unwrap();
        let labels: Vec<_> = points.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels[..2], ["weights.b=1,threshold=3", "weights.b=1,threshold=4"]);
        assert_eq!(points.len(), 4);
        assert_eq!(points[3].1, json!({"threshold": 4, "weights": {"a": 0.1, "b": 2}}));
        let sweeps = [Sweep::parse("a=['1,b=2', 1]").unwrap(), Sweep::parse("b=[3, '2,b=3']").unwrap()];
        let error = combinations(&base, &sweeps).unwrap_err();
        assert_eq!(error, "two points would be called `a=1,b=2,b=3`; give other values");
        let error = combinations(&base, &[Sweep::parse("threshold.x=1").unwrap()]).unwrap_err();
        assert_eq!(error, "setting `threshold.x`: `x` cannot be set in 1, which is not a table");
    }

    #[test]
    fn bounds_of_a_schema() {
        let schema = r#"{"properties": {
            "threshold": {"type": "number", "minimum": 0, "maximum": 1.5},
            "budget": {"type": "integer", "minimum": 1},
            "weights": {"additionalProperties": {"maximum": 1}, "properties": {"x": {"minimum": 0.5}}}
        }, "additionalProperties": false}"#;
        let of = |setting| bounds(schema, setting);
        assert_eq!(of("threshold"), Bounds { minimum: Some(0.0), maximum: Some(1.5), integer: false });
        assert_eq!(of("budget"), Bounds { minimum: Some(1.0), maximum: None, integer: true });
        assert_eq!((of("weights.small").maximum, of("weights.x").minimum), (Some(1.0), Some(0.5)));
        assert_eq!((of("none"), of("threshold.x")), (Bounds::default(), Bounds::default()));
    }

    #[test]
    fn lines_to_paste() {
        let lines = config_lines("r.1", &json!({"threshold": 0.25, "weights": {"small": 1}})).unwrap();
        let back: toml::Table = toml::from_str(&lines).unwrap();
        assert_eq!(back["routes"]["r.1"]["settings"]["weights"]["small"].as_integer(), Some(1));
        assert!(lines.starts_with("[routes.\"r.1\".settings]\nthreshold = 0.25\n"), "{lines}");
    }

    #[test]
    fn short_values() {
        assert_eq!(shown(&json!({"small": 0.5, "d": [1, "x"]})), "{small=0.5,d=[1,x]}");
    }
}
