//! Which models hang together. Pure.

/// Share of a model's requests below which a way counts for none: chains that are almost two do not converge.
const RARE: f64 = 1e-4;

/// Models, ascending, among which requests go round: from each of them every other one is reached. Of several such
/// groups the one with the most requests; empty where no request comes back. `counts[from][to]`: requests.
pub fn connected(counts: &[Vec<f64>]) -> Vec<usize> {
    let models = counts.len();
    let all: Vec<f64> = counts.iter().map(|row| row.iter().sum()).collect();
    let leads = |from: usize, to: usize| counts[from][to] > RARE * all[from];
    let mut reached: Vec<Vec<bool>> = (0..models).map(|from| (0..models).map(|to| leads(from, to)).collect()).collect();
    for over in 0..models {
        let row = reached[over].clone();
        for from in reached.iter_mut().filter(|from| from[over]) {
            from.iter_mut().zip(&row).for_each(|(reached, further)| *reached |= further);
        }
    }
    let group = |model: usize| (0..models).filter(|&other| reached[model][other] && reached[other][model]).collect();
    let groups = (0..models).map(group).filter(|group: &Vec<usize>| !group.is_empty());
    let weight = |group: &Vec<usize>| group.iter().map(|model| all[*model]).sum::<f64>();
    // Of equal ones the first.
    groups.rev().max_by(|a, b| weight(a).total_cmp(&weight(b))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_with_most_requests_is_taken() {
        let pair = |there: f64, alone: f64| vec![vec![80.0, there, 0.0], vec![20.0, 0.0, 0.0], vec![0.0, 0.0, alone]];
        assert_eq!(connected(&pair(20.0, 50.0)), [0, 1]);
        assert_eq!(connected(&pair(20.0, 500.0)), [2]);
        // Nobody goes there.
        assert_eq!(connected(&pair(0.0, 5.0)), [0]);
        // One in a hundred thousand does, and nobody comes back.
        let mut rare = pair(20.0, 50.0);
        rare[0][2] = 1e-3;
        rare[2][0] = 1.0;
        assert_eq!(connected(&rare), [0, 1]);
        rare[0][2] = 1.0;
        assert_eq!(connected(&rare), [0, 1, 2]);
        assert_eq!(connected(&[vec![0.0, 5.0], vec![0.0, 0.0]]), [0; 0]);
    }
}
