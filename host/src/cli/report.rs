//! What is served, in tables. Pure.

use super::plan::table;
use crate::config::Config;

/// A plugin as it was loaded, for the table of routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginInfo {
    pub name: String,
    pub version: String,
    pub path: String,
}

/// The routes, one a line, with their policies and models. `plugins` has one for each route.
pub fn routes(config: &Config, plugins: &[PluginInfo]) -> String {
    let mut rows = vec![["route", "policy", "models", "plugin"].map(String::from)];
    for (route, plugin) in config.routes.iter().zip(plugins) {
        let models: Vec<String> = route
            .models
            .iter()
            .enumerate()
            .map(|(i, (model, role))| {
                let name = &config.models[*model].name;
                let role = if role == name { String::new() } else { format!(" = {role}") };
                let entry = if i == route.entry { " (entry)" } else { "" };
                format!("{name}{role}{entry}")
            })
            .collect();
        let policy = format!("{} {}", plugin.name, plugin.version);
        rows.push([route.name.clone(), policy, models.join(", "), plugin.path.clone()]);
    }
    for model in &config.models {
        rows.push([model.name.clone(), "-".into(), model.name.clone(), String::new()]);
    }
    table(&rows, 4)
}

/// A request to try, as a command. The first route answers it, or the first model.
pub fn curl(config: &Config, server: &str) -> String {
    let front = &config.server.front;
    let keys = front.api_key_file.is_some() || !front.api_keys.is_empty();
    let key = if keys { " -H 'Authorization: Bearer KEY'" } else { "" };
    let first = config.routes.first().map(|r| &r.name).or(config.models.first().map(|m| &m.name));
    let model = first.map_or("", String::as_str);
    format!(
        "curl {server}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{{\"model\": \"{model}\", \
         \"messages\": [{{\"role\": \"user\", \"content\": \"Compute 17 * 24.\"}}], \"temperature\": 0}}'"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn config(text: &str) -> Config {
        Config::parse(text, Path::new("c.toml"), &BTreeMap::new()).unwrap()
    }

    #[test]
    fn the_table_of_routes() {
        let config = config(
            "[models.small]\npath = 's'\n[models.large]\npath = 'l'\n\
             [routes.r]\nplugin = 'p'\nroles = { large = 'llm', small = 'slm' }\nentry = 'small'\n\
             [routes.draw]\nplugin = 'q'\nmodels = ['small', 'large']\n",
        );
        let plugin =
            |name: &str| PluginInfo { name: name.into(), version: "0.1.0".into(), path: format!("lib{name}.so") };
        assert_eq!(
            routes(&config, &[plugin("p"), plugin("q")]),
            "\
route  policy   models                            plugin
r      p 0.1.0  large = llm, small = slm (entry)  libp.so
draw   q 0.1.0  small (entry), large              libq.so
small  -        small
large  -        large
"
        );
    }

    #[test]
    fn a_request_to_try() {
        let curl = curl(&config("[models.m]\npath = 's'\n"), "http://[::1]:80");
        assert!(curl.starts_with("curl http://[::1]:80/v1/chat/completions "), "{curl}");
        let body = curl.split('\'').nth(3).unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["model"], "m");
    }
}
