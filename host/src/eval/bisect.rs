//! Finding the setting that gives the large model a certain share of the tokens, by bisection.

/// The search so far. Ask [`Search::next`], measure, tell [`Search::measured`].
#[derive(Clone, Debug)]
pub struct Search {
    low: f64,
    high: f64,
    integer: bool,
    target: f64,
    tolerance: f64,
    /// Values with their shares, in the order in which they were measured.
    measured: Vec<(f64, f64)>,
}

/// What follows.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Measure this value.
    Try(f64),
    /// This value gives a share within the tolerance.
    Found { value: f64, share: f64 },
    /// There is none; why, with the closest one.
    NotFound { value: f64, share: f64, reason: String },
}

/// After so many halvings two values differ by less than a policy can tell.
const MOST_MEASURED: usize = 42;

impl Search {
    /// Search `low..=high`; with `integer` whole numbers only. `target` and `tolerance` are shares from 0 to 1.
    pub fn new((low, high): (f64, f64), integer: bool, target: f64, tolerance: f64) -> Result<Self, String> {
        let (low, high) = if integer { (low.ceil(), high.floor()) } else { (low, high) };
        if !(low < high && low.is_finite() && high.is_finite()) {
            return Err(format!("the range {low},{high} is empty; give LOW,HIGH with LOW below HIGH"));
        }
        Ok(Self { low, high, integer, target, tolerance, measured: Vec::new() })
    }

    /// The ends, which are tried first.
    pub fn range(&self) -> [f64; 2] {
        [self.low, self.high]
    }

    /// `value` gave `share`.
    pub fn measured(&mut self, value: f64, share: f64) {
        self.measured.push((value, share));
    }

    fn closest(&self) -> Option<(f64, f64)> {
        self.measured.iter().copied().min_by(|(_, a), (_, b)| self.distance(*a).total_cmp(&self.distance(*b)))
    }

    fn distance(&self, share: f64) -> f64 {
        (share - self.target).abs()
    }

    pub fn next(&self) -> Next {
        if let Some((value, share)) = self.closest()
            && self.distance(share) <= self.tolerance
        {
            return Next::Found { value, share };
        }
        let (mut a, mut b) = match self.measured.as_slice() {
            [] => return Next::Try(self.low),
            [_] => return Next::Try(self.high),
            [low, high, ..] => (*low, *high),
        };
        let below = |(_, share): (f64, f64)| share < self.target;
        let percent = |share: f64| 100.0 * share;
        if below(a) == below(b) {
            return self.not_found(format!(
                "the share is {:.1} % at {} and {:.1} % at {}, both {} {:.1} %; widen --range",
                percent(a.1),
                a.0,
                percent(b.1),
                b.0,
                if below(a) { "below" } else { "above" },
                percent(self.target)
            ));
        }
        // One of the two is always below the target and the other above it.
        for &point in &self.measured[2..] {
            if below(point) == below(a) { a = point } else { b = point }
        }
        let middle = a.0 + (b.0 - a.0) / 2.0;
        let middle = if self.integer { middle.floor() } else { short(middle, (b.0 - a.0).abs() / 10.0) };
        if middle == a.0 || middle == b.0 || self.measured.len() >= MOST_MEASURED {
            return self.not_found(format!(
                "the share jumps from {:.1} % at {} to {:.1} % at {}; allow for it with --tolerance",
                percent(a.1),
                a.0,
                percent(b.1),
                b.0
            ));
        }
        Next::Try(middle)
    }

    fn not_found(&self, reason: String) -> Next {
        let (value, share) = self.closest().unwrap_or((f64::NAN, f64::NAN));
        Next::NotFound { value, share, reason }
    }

    /// Two neighbouring values between which the share moves against the direction that the ends of the
    /// range show, by more than the tolerance: other values may then have the wanted share, too.
    pub fn against_direction(&self) -> Option<[(f64, f64); 2]> {
        let [low, high, ..] = self.measured.as_slice() else { return None };
        let direction = (high.1 - low.1).signum();
        let mut points = self.measured.clone();
        points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        points.windows(2).map(|pair| [pair[0], pair[1]]).find(|[a, b]| (a.1 - b.1) * direction > self.tolerance)
    }
}

/// The number with the fewest decimals that is no farther from `middle` than `most`: values are read and
/// written by people.
fn short(middle: f64, most: f64) -> f64 {
    let rounded = |decimals: i32| (middle * 10f64.powi(decimals)).round() / 10f64.powi(decimals);
    (0..18).map(rounded).find(|number| (number - middle).abs() <= most).unwrap_or(middle)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Search with `share` as the measurement. Returns the end and the values tried.
    fn search(mut search: Search, share: impl Fn(f64) -> f64) -> (Next, Vec<f64>, Search) {
        let mut tried = Vec::new();
        loop {
            match search.next() {
                Next::Try(value) => {
                    assert!(tried.len() < 100 && !tried.contains(&value), "{tried:?}");
                    tried.push(value);
                    search.measured(value, share(value));
                }
                end => return (end, tried, search),
            }
        }
    }

    fn real(target: f64) -> Search {
        Search::new((0.0, 1.0), false, target, 0.005).unwrap()
    }

    #[test]
    fn rising_and_falling() {
        for (share, target) in [(&(|x: f64| x * x) as &dyn Fn(f64) -> f64, 0.1), (&|x: f64| (-20.0 * x).exp(), 0.1)] {
            let (end, tried, search) = search(real(target), share);
            let Next::Found { value, share: found } = end else { panic!("{end:?}") };
            assert!((found - target).abs() <= 0.005 && found == share(value), "{found}");
            assert!(tried.len() <= 12, "{tried:?}");
            assert_eq!(search.against_direction(), None);
        }
    }

    #[test]
    fn values_are_short() {
        assert_eq!((short(0.026328125, 0.0003), short(0.5, 0.1), short(1234.5, 40.0)), (0.0263, 0.5, 1235.0));
        assert_eq!((short(1.0 / 3.0, 0.0), short(-0.0625, 0.0125)), (1.0 / 3.0, -0.06));
        let (_, tried, _) = search(real(0.1), |x| (-20.0 * x).exp());
        assert!(tried.iter().all(|value| value.to_string().len() <= 6), "{tried:?}");
    }

    #[test]
    fn an_end_may_be_it() {
        let (end, tried, _) = search(real(1.0), |x| 1.0 - x);
        assert_eq!((end, tried), (Next::Found { value: 0.0, share: 1.0 }, vec![0.0]));
    }

    #[test]
    fn out_of_reach() {
        let (end, tried, _) = search(real(0.5), |x| 0.3 * x);
        let Next::NotFound { value, share, reason } = end else { panic!("{end:?}") };
        assert_eq!((value, share, tried.len()), (1.0, 0.3, 2));
        assert_eq!(reason, "the share is 0.0 % at 0 and 30.0 % at 1, both below 50.0 %; widen --range");
    }

    #[test]
    fn a_jump() {
        let (end, tried, _) = search(real(0.5), |x| if x < 0.3 { 0.2 } else { 0.9 });
        let Next::NotFound { share, reason, .. } = end else { panic!("{end:?}") };
        assert_eq!(share, 0.2);
        assert_eq!(
            reason,
            "the share jumps from 20.0 % at 0.2999999999995 to 90.0 % at 0.3; allow for it with --tolerance"
        );
        assert!(tried.len() <= MOST_MEASURED);
    }

    #[test]
    fn whole_numbers() {
        let whole = Search::new((0.5, 9.5), true, 0.4, 0.01).unwrap();
        let (end, tried, _) = search(whole.clone(), |x| x / 10.0);
        assert_eq!(end, Next::Found { value: 4.0, share: 0.4 });
        assert!(tried.iter().all(|value| value.fract() == 0.0 && (1.0..=9.0).contains(value)), "{tried:?}");
        let (end, ..) = search(whole, |x| if x < 4.0 { 0.0 } else { 1.0 });
        assert!(matches!(end, Next::NotFound { ref reason, .. } if reason.contains("at 3 to 100.0 % at 4")), "{end:?}");
    }

    #[test]
    fn not_monotone() {
        let (end, _, search) = search(real(0.42), |x| if x < 0.5 { 1.9 * x } else { 1.0 - 0.1 * x });
        assert!(matches!(end, Next::Found { .. }), "{end:?}");
        assert_eq!(search.against_direction(), Some([(0.5, 0.95), (1.0, 0.9)]));
    }

    #[test]
    fn empty_ranges() {
        for (range, integer) in [((1.0, 1.0), false), ((2.0, 1.0), false), ((0.2, 0.8), true), ((0.0, f64::NAN), false)]
        {
            assert!(Search::new(range, integer, 0.5, 0.1).unwrap_err().contains("is empty"));
        }
    }
}
